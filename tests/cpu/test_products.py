"""Products of routed rows with packed weights, through a node's passes: exact where integers make them so.

T tokens · N routed rows · E experts · H hidden · I intermediate

Sums of small integers are exact in every order, so bf16 is compared to the bit, and with 127 as the largest of every
row and channel int8 is too: its scales are then one.
"""

import shutil

import pytest
import torch
from test_node import KINDS, Layer
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.problem import Needs
from amoeba.cpu import weights as packed
from amoeba.cpu.node_passes import NodeExperts, backward, forward
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import PackedWeights, Path
from selection import each_value_once

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
COUNTS = (0, 1, 7, 31, 0, 33, 200, 0)  # rows per expert
UNOWNED = 5
SIZES = [(1, 1), (31, 760), (32, 32), (63, 199), (96, 31), (199, 96), (760, 63), (32, 1), (1, 199)]  # H, I
ONLY_X = Needs(x=True, weight=True)
RELU = Activation("relu", gated=False)


def integers(largest: int, *shape: int) -> Tensor:
    return torch.randint(-largest, largest + 1, shape).to(torch.bfloat16)


class Case:
    """Experts without a gate and relu between, one expert per token; NaN in the tokens that belong to nobody."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        torch.manual_seed(0)
        experts = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
        expert_T = torch.cat([experts, torch.full((UNOWNED,), -1)])
        self.expert_T = expert_T[torch.randperm(len(expert_T))]
        self.owned_T = self.expert_T >= 0
        tokens = len(expert_T)
        self.up_EIH, self.down_EHI = (
            integers(3, len(COUNTS), *shape) for shape in ((intermediate, hidden), (hidden, intermediate))
        )
        self.x_TH, self.dy_TH = integers(3, tokens, hidden), integers(3, tokens, hidden)

    def run(self, kind: str, workers: WorkerPool) -> dict[str, Tensor]:
        """h, and of the tokens that have an expert y, dx and the gradient of their routing weight."""
        weights = PackedWeights.pack(self.up_EIH, kind), PackedWeights.pack(self.down_EHI, kind)
        node = NodeExperts(*weights, None, None, RELU)
        x_TH, dy_TH = self.x_TH.clone(), self.dy_TH.clone()
        x_TH[~self.owned_T], dy_TH[~self.owned_T] = torch.nan, torch.nan
        weight_TK = torch.ones(len(x_TH), 1)
        y_TH, cache = forward(node, None, x_TH, self.expert_T[:, None].contiguous(), weight_TK, workers, save="h")
        assert cache is not None and cache.h_NJ is not None
        gradients = backward(node, None, cache, dy_TH, workers, ONLY_X)
        assert gradients.x is not None and gradients.weight is not None
        for rows in (y_TH, gradients.x, gradients.weight):
            assert (rows[~self.owned_T] == 0).all(), "a token that belongs to nobody has something"
        sorted_T = self.expert_T.argsort(stable=True)[UNOWNED:]
        h_TI = torch.zeros(len(x_TH), cache.h_NJ.shape[1], dtype=torch.bfloat16)
        h_TI[sorted_T] = cache.h_NJ[: len(sorted_T)]
        found = {"h": h_TI, "y": y_TH, "x": gradients.x, "weight": gradients.weight[:, 0]}
        return {name: rows[self.owned_T] for name, rows in found.items()}

    def h(self) -> Tensor:
        """Exact, fp64."""
        owned = self.owned_T
        return torch.einsum("th,tih->ti", self.x_TH[owned].double(), self.up_EIH[self.expert_T[owned]].double())

    def expected(self) -> dict[str, Tensor]:
        """As the passes round: h, a, dh and the rows of y and dx to bf16, sums not at all."""
        e_T, dy = self.expert_T[self.owned_T], self.dy_TH[self.owned_T].double()
        up, down = self.up_EIH[e_T].double(), self.down_EHI[e_T].double()
        h = rounded(self.h())
        a = h.clamp(min=0)
        da = torch.einsum("th,thi->ti", dy, down)
        dh = rounded(da * (h > 0))
        return {
            "h": h.to(torch.bfloat16),
            "y": rounded(torch.einsum("ti,thi->th", a, down)).float(),
            "x": rounded(torch.einsum("ti,tih->th", dh, up)).float(),
            "weight": (da * a).sum(1).float(),
        }


def rounded(values: Tensor) -> Tensor:
    """To bf16, of integers that fp32 has exactly."""
    assert values.abs().max() < 2**24
    return values.float().to(torch.bfloat16).double()


@each_value_once("path")
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_bf16_is_exact_on_integers_in_every_row_and_column(path, hidden, intermediate, workers):
    case = Case(hidden, intermediate)
    found, expected = case.run("bf16", workers), case.expected()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@each_value_once("path")
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_int8_is_exact_on_integers_in_every_row_and_column(path, hidden, intermediate, workers):
    case = Case(hidden, intermediate)
    for rows in (case.x_TH, case.up_EIH):
        rows.copy_(integers(127, *rows.shape))
        rows[..., 0] = 127 * torch.randint(0, 2, rows.shape[:-1]) * 2 - 127  # either end
    expected = rounded(case.h()).to(torch.bfloat16)
    assert torch.equal(case.run("int8", workers)["h"], expected)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_int8_has_the_same_bits_on_every_path(hidden, intermediate, workers, monkeypatch):
    if packed.load_packed().best_path is Path.GENERIC:
        pytest.skip("this CPU with this compiler has one path")
    layer = Layer("int8", 200, 2, 3, hidden, intermediate, (0, 0, 0))
    monkeypatch.setenv("AMOEBA_CPU_PATH", "generic")
    plain = layer.run(workers, needs=ONLY_X)
    for path in range(Path.AVX512, packed.load_packed().best_path + 1):
        monkeypatch.setenv("AMOEBA_CPU_PATH", Path(path).name.lower())
        for name, found in layer.run(workers, needs=ONLY_X).items():
            assert torch.equal(found, plain[name]), f"{name} by {Path(path).name}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row_and_is_not_lost(path: str, kind: str, workers: WorkerPool) -> None:
    case = Case(65, 33)
    token = int(case.owned_T.nonzero()[20])
    case.x_TH[token, 64] = torch.nan
    found = case.run(kind, workers)
    for name in ("h", "y"):
        with_nan = found[name].isnan()
        assert with_nan[20].all(), name
        assert with_nan.any(1).nonzero().flatten().tolist() == [20], name


def test_zero_rows_and_zero_channels_of_int8_are_zeros(path: str, workers: WorkerPool) -> None:
    case = Case(65, 33)
    case.x_TH[case.owned_T.nonzero()[10]], case.up_EIH[:, 5] = 0, 0
    found = case.run("int8", workers)
    assert (found["h"][10] == 0).all() and (found["h"][:, 5] == 0).all() and found["h"].count_nonzero()
    assert (found["y"][10] == 0).all()


def test_int8_keeps_rows_and_channels_of_very_different_size(path: str, workers: WorkerPool) -> None:
    case = Case(96, 40)
    case.x_TH.normal_().mul_(torch.logspace(-6, 6, len(case.x_TH))[:, None].to(torch.bfloat16))
    case.up_EIH.normal_().mul_(torch.logspace(-3, 3, 40)[:, None].to(torch.bfloat16))
    # A value is off by up to half a step of 1/127 of the largest of its row or channel, which is 2.6 times the typical
    # one of 96: by 0.6 % of its length on either side, in a random direction. That is 9e-4 of |row| · |channel| in the
    # mean of the squares and 4.5 times that at worst. By row alone nothing could be said: its largest sums may cancel.
    # That h is rounded to bf16 adds 1e-4 to that.
    channels = case.up_EIH[case.expert_T[case.owned_T]].double().norm(dim=2)
    possible = case.x_TH[case.owned_T].double().norm(dim=1, keepdim=True) * channels
    error = (case.run("int8", workers)["h"].double() - case.h()) / possible
    assert error.square().mean().sqrt() < 1.1e-3
    assert error.abs().max() < 6e-3


@pytest.mark.amx
def test_tiles_left_by_torch_do_not_disturb_ours_nor_ours_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMOEBA_CPU_PATH", "amx")
    case, dense = Case(199, 96), torch.randn(129, 257).to(torch.bfloat16)
    same_threads = WorkerPool()
    theirs, ours = dense @ dense.t(), case.run("bf16", same_threads)
    for _ in range(3):
        assert torch.equal(dense @ dense.t(), theirs)
        again = case.run("bf16", same_threads)
        assert all(torch.equal(again[name], ours[name]) for name in ours)
