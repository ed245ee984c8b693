"""One node's packed experts: every gradient by name against fp64, awkward sizes, and the same bits every time.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.problem import Needs
from amoeba.core.weights import LORA_NAMES, ExpertWeights, LoraFactors
from amoeba.cpu import build
from amoeba.cpu.node_passes import NodeCache, NodeExperts, NodeFactors, backward, forward
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import PackedWeights
from amoeba.proof.reference.experts import experts_backward, experts_forward
from selection import each_value_once

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
KINDS = ["bf16", "int8"]
WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")
LARGEST_ERROR = {"bf16": {"output": 5e-3, "gradient": 1e-2}, "int8": {"output": 3e-2, "gradient": 5e-2}}
ALL = Needs(True, True, **dict.fromkeys(LORA_NAMES, True))
GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)


@dataclass
class Layer:
    """Weights, factors and a batch; `expert_TK` may be given."""

    kind: str = "bf16"
    tokens: int = 40
    top_k: int = 2
    experts: int = 5
    hidden: int = 96
    intermediate: int = 64
    ranks: tuple[int, int, int] = (8, 8, 8)  # of gate, up, down; 0: no factors
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    share_a: bool = False
    expert_TK: Tensor | None = None
    factor_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        E, H, I = self.experts, self.hidden, self.intermediate
        J = self.activation.width(I)
        self.gate_up = (torch.randn(E, J, H) / H**0.5).to(torch.bfloat16)
        self.down = (torch.randn(E, H, I) / I**0.5).to(torch.bfloat16)
        self.gate_up_bias, self.down_bias = (torch.randn(E, J), torch.randn(E, H)) if self.bias else (None, None)
        gate, up, down = self.ranks
        factors = {
            name: (torch.randn(E, *shape) / 8).to(self.factor_dtype) if 0 not in shape else None
            for name, shape in zip(
                LORA_NAMES, [(gate, H), (I, gate), (up, H), (I, up), (down, I), (H, down)], strict=True
            )
        }
        if self.share_a:
            factors["up_lora_a"] = factors["gate_lora_a"]
        self.lora = LoraFactors(**factors, scaling=2.0)
        self.x_TH = torch.randn(self.tokens, H).to(torch.bfloat16)
        self.dy_TH = torch.randn(self.tokens, H).to(torch.bfloat16)
        if self.expert_TK is None:
            self.expert_TK = torch.rand(self.tokens, E).argsort(1)[:, : self.top_k].contiguous()
        self.weight_TK = torch.rand(self.expert_TK.shape) + 0.1

    def node(self) -> NodeExperts:
        weights = PackedWeights.pack(self.gate_up, self.kind), PackedWeights.pack(self.down, self.kind)
        return NodeExperts(*weights, self.gate_up_bias, self.down_bias, self.activation)

    def run(self, workers: WorkerPool, save: str = "h", needs: Needs = ALL) -> dict[str, Tensor]:
        mine = self.node()
        factors = NodeFactors.pack(mine, self.lora, workers) if self.lora.tensors() else None
        y_TH, cache = forward(mine, factors, self.x_TH, self.expert_TK, self.weight_TK, workers, save=save)
        found = {"output": y_TH}
        if cache is not None:
            gradients = backward(mine, factors, cache, self.dy_TH, workers, needs)
            found |= {n.split("_T")[0]: g for n, g in gradients._asdict().items() if g is not None}
        return found

    def expected(self, *trained: str) -> dict[str, Tensor]:
        """trained: the weights whose gradients are among them."""
        biases = (None if b is None else b.double() for b in (self.gate_up_bias, self.down_bias))
        weights = ExpertWeights(self.gate_up.double(), self.down.double(), *biases, self.activation)
        lora = LoraFactors(
            **{n: t.to(torch.bfloat16).double() for n, t in self.lora.tensors().items()}, scaling=self.lora.scaling
        )
        given = self.x_TH.double(), self.expert_TK, self.weight_TK.double(), weights, lora
        gradients = experts_backward(self.dy_TH.double(), *given)
        names = ("x", "weight", *trained, *self.lora.tensors())
        return {"output": experts_forward(*given)} | {name: gradients[name] for name in names}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str, looser: float = 1) -> None:
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        got = found[name]
        dtype = torch.bfloat16 if name in WEIGHTS[:2] else torch.float32
        assert got.dtype == dtype and got.shape == truth.shape, name
        limit = looser * LARGEST_ERROR[kind]["output" if name == "output" else "gradient"]
        norm = float(truth.norm())
        error = float((got.double() - truth).norm()) / norm if norm else float(got.abs().max() if got.numel() else 0)
        print(f"{kind} {name}: {error:.1e}")
        assert error < limit, f"{name}: relative error {error:.1e}, at most {limit} is right"
        if norm and name == "output":
            cosine = float((got.double() * truth).sum() / (got.double().norm() * norm))
            assert cosine > 0.9995
        # nobody's slots, and tokens and experts without rows, have exact zeros
        idle = truth == 0 if name == "weight" else (truth == 0).flatten(1).all(1)
        assert (got[idle] == 0).all(), name


def test_the_check_can_fail() -> None:
    expected = Layer().expected()
    for name, wrong in (("output", 1.01), ("gate_lora_b", 1.02), ("weight", 1.02)):
        with pytest.raises(AssertionError, match=name):
            check({n: (t * (wrong if n == name else 1)).float() for n, t in expected.items()}, expected, "bf16")


@each_value_once("path")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(hidden=63, intermediate=199, ranks=(5, 5, 5)),
        Layer(tokens=300, top_k=4, experts=4, ranks=(16, 16, 16)),  # K = E, several blocks of rows
        Layer(ranks=(40, 40, 40)),
        Layer(ranks=(1, 1, 1), hidden=33, intermediate=31),
        Layer(ranks=(3, 9, 5)),
        Layer(tokens=1),
        Layer(tokens=1, top_k=1, experts=1, hidden=1, intermediate=1, ranks=(1, 1, 1)),
        Layer(bias=True),
        Layer(bias=True, hidden=63, intermediate=199),
        Layer(share_a=True),
        Layer(factor_dtype=torch.float32),
        Layer(tokens=700, top_k=1, experts=2, hidden=70, intermediate=40),  # more rows than a job takes
        Layer(tokens=200, top_k=1, experts=1, hidden=4001, intermediate=33),  # deeper rows than the L2 cache takes
    ],
    ids=lambda layer: f"T{layer.tokens}-E{layer.experts}-H{layer.hidden}-I{layer.intermediate}-R{layer.ranks}",
)
def test_output_and_every_gradient_agree_with_fp64(path: str, kind: str, layer: Layer, workers: WorkerPool) -> None:
    layer = replace(layer, kind=kind, expert_TK=None)
    check(layer.run(workers), layer.expected(), kind)


@each_value_once("path")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("intermediate", [72, 31])
@pytest.mark.parametrize(
    "activation",
    [
        GPT_OSS,
        Activation("gelu"),
        Activation("gelu_tanh"),
        Activation("relu"),
        Activation("relu2", gated=False),
        Activation("gelu", gated=False),
        Activation("silu", gated=False, alpha=1.3),
    ],
    ids=lambda a: f"{a.kind}{'' if a.gated else '-plain'}{'-interleaved' if a.interleaved else ''}",
)
def test_every_activation(path: str, kind: str, activation: Activation, intermediate: int, workers: WorkerPool) -> None:
    ranks = (5, 5, 5) if activation.gated else (0, 5, 5)
    layer = Layer(kind, activation=activation, intermediate=intermediate, ranks=ranks, bias=True)
    # where a slope jumps, an h that was rounded across the jump is wrong by all of it
    jumps = activation.kind == "relu"
    check(layer.run(workers), layer.expected(), kind, looser=8 if jumps else 1)


@each_value_once("path")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("intermediate", [64, 72])
@pytest.mark.parametrize("interleaved", [False, True])
def test_clamped_values_pass_no_gradient(path, kind, intermediate, interleaved, workers):
    """All of h lies far from the limit, on either side, so that rounding moves nothing across it."""
    activation = Activation("silu", limit=2.0, up_shift=0.5, interleaved=interleaved)
    layer = Layer(kind, activation=activation, intermediate=intermediate, bias=True, ranks=(0, 0, 4))
    assert layer.gate_up_bias is not None
    layer.gate_up /= 16
    layer.gate_up_bias = torch.randint(-1, 2, layer.gate_up_bias.shape) * 8.0 + 0.5
    found, expected = layer.run(workers), layer.expected()
    check(found, expected, kind)
    free = replace(layer, activation=Activation("silu", up_shift=0.5, interleaved=interleaved), expert_TK=None)
    free.gate_up, free.gate_up_bias = layer.gate_up, layer.gate_up_bias
    assert float((free.expected()["x"] - expected["x"]).norm()) > 0.1 * float(expected["x"].norm())


@each_value_once("path")
@pytest.mark.parametrize("ranks", [(0, 0, 0), (0, 4, 0), (4, 0, 0), (0, 0, 4), (4, 0, 3), (0, 40, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_projections_without_factors(path: str, kind: str, ranks: tuple[int, int, int], workers: WorkerPool) -> None:
    layer = Layer(kind, ranks=ranks)
    check(layer.run(workers), layer.expected(), kind)


@each_value_once("path")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("intermediate", [64, 31])
def test_keeping_x_alone_gives_the_same_bits(path: str, kind: str, intermediate: int, workers: WorkerPool) -> None:
    layer = Layer(kind, intermediate=intermediate)
    kept, again = layer.run(workers, save="h"), layer.run(workers, save="inputs")
    for name in kept:
        assert torch.equal(kept[name], again[name]), name
    check(again, layer.expected(), kind)
    assert torch.equal(layer.run(workers, save="nothing")["output"], kept["output"])


SOME_NOBODYS = torch.arange(120).view(40, 3) % 5
SOME_NOBODYS[::3, 1], SOME_NOBODYS[1::9, 0], SOME_NOBODYS[5], SOME_NOBODYS[7] = -1, 2**40, -(2**62), 5
ROUTINGS = {
    "idle experts": torch.tensor([[3, 1]] * 40),
    "one expert": torch.full((130, 1), 2),
    "an expert twice": torch.tensor([[1, 1]] * 40),
    "some of nobody's": SOME_NOBODYS,
    "nobody's alone": torch.full((40, 2), 5),
    "no tokens": torch.zeros(0, 2, dtype=torch.int64),
}


@each_value_once("path")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expert_TK", ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing(path: str, kind: str, expert_TK: Tensor, workers: WorkerPool) -> None:
    layer = Layer(kind, tokens=len(expert_TK), expert_TK=expert_TK)
    check(layer.run(workers), layer.expected(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_threads_nor_repetition_change_a_bit(path: str, kind: str, workers: WorkerPool) -> None:
    layer = Layer(kind, tokens=150, top_k=3, ranks=(5, 5, 5))
    first = layer.run(WorkerPool(1))
    for other in (workers, workers, WorkerPool(5)):
        again = layer.run(other)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def test_rows_may_lie_apart(path: str, workers: WorkerPool) -> None:
    layer = Layer()
    expected = layer.run(workers)
    for name in ("x_TH", "dy_TH"):
        wide = torch.full((40, 130), torch.nan, dtype=torch.bfloat16)
        wide[:, 17 : 17 + 96] = getattr(layer, name)
        setattr(layer, name, wide[:, 17 : 17 + 96])
    found = layer.run(workers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_large_outputs_that_are_streamed_past_the_caches_are_whole(path: str, workers: WorkerPool) -> None:
    layer = Layer(tokens=2100, top_k=1, experts=2, hidden=2048, intermediate=32, ranks=(2, 2, 2))
    assert layer.tokens * layer.hidden * 2 > 8 << 20, "the core streams above this size"
    check(layer.run(workers), layer.expected(), "bf16")


def test_factors_may_have_any_strides(workers: WorkerPool) -> None:
    layer = Layer()
    expected = layer.run(workers)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in layer.lora.tensors().items()}
    layer.lora = LoraFactors(**turned, scaling=2.0)
    found = layer.run(workers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_repacked_factors_reuse_only_the_memory_of_dead_ones(workers: WorkerPool) -> None:
    layer, other = Layer(), Layer()
    mine = layer.node()
    other.lora = LoraFactors(**{n: -2 * t for n, t in layer.lora.tensors().items()}, scaling=2.0)

    def output(factors: NodeFactors) -> Tensor:
        return forward(mine, factors, layer.x_TH, layer.expert_TK, layer.weight_TK, workers, save="nothing")[0]

    first = NodeFactors.pack(mine, layer.lora, workers)
    before, place = output(first), first.structure.up_a.data
    second = NodeFactors.pack(mine, other.lora, workers)
    assert not torch.equal(output(second), before)
    assert torch.equal(output(first), before)
    del first
    third = NodeFactors.pack(mine, layer.lora, workers)
    assert third.structure.up_a.data == place
    assert torch.equal(output(third), before)


@pytest.mark.thorough  # every run: test_sums.py, and test-other-cpus for AVX2
@pytest.mark.usefixtures("older_instructions")
def test_older_instruction_sets_agree_too() -> None:
    threads = WorkerPool(2)
    for kind in KINDS:
        for layer in (Layer(kind), Layer(kind, hidden=63, intermediate=199, ranks=(5, 5, 5), activation=GPT_OSS)):
            check(layer.run(threads), layer.expected(), kind)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_pass_takes_as_much_memory_as_was_predicted() -> None:
    """In a process of its own, whose memory nothing else has grown before."""
    program = """
import gc, torch
from amoeba.cpu.node_passes import workspace_bytes
from test_node import ALL, Layer, NodeFactors, WorkerPool, backward, forward
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
Layer(hidden=64, intermediate=32).run(WorkerPool(1))
layer, pool = Layer(tokens=4000, top_k=4, experts=8, hidden=512, intermediate=256), WorkerPool(1)
node = layer.node()
node.gate_up.transposed, node.down.transposed
factors = NodeFactors.pack(node, layer.lora, pool)
sizes = workspace_bytes(node, 4000, 4, ranks=layer.ranks)
before = resident()
y, cache = forward(node, factors, layer.x_TH, layer.expert_TK, layer.weight_TK, pool, save="h")
gradients = backward(node, factors, cache, layer.dy_TH, pool, ALL)
results = sum(t.nbytes for t in (y, *gradients) if t is not None)
print(resident() - before - results, max(sizes["forward"], sizes["backward"]) + sizes["cache"], sizes["thread"])
"""
    paths = [
        str(FilePath(build.__file__).parents[2]),
        str(FilePath(__file__).parent),
        str(FilePath(__file__).parents[1] / "support"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    took, predicted, thread = map(int, done.stdout.split())
    print(f"took {took / 2**20:.1f} MiB, predicted {predicted / 2**20:.1f} and {thread / 2**20:.1f} for the thread")
    assert 0.9 * predicted < took < 1.1 * (predicted + thread)


class TestRefusals:
    def test_tensors_are_checked_before_a_pointer_is_taken(self, workers: WorkerPool) -> None:
        layer = Layer()
        mine = layer.node()
        x, expert, weight = layer.x_TH, layer.expert_TK, layer.weight_TK
        assert expert is not None
        good = (x, expert, weight)
        forward(mine, None, *good, workers, save="nothing")
        for place, bad in [
            (0, x.float()), (0, x[:, :95]), (0, torch.zeros(96, 40, dtype=torch.bfloat16).t()), (0, x[0]), (0, x[:39]),
            (1, expert.int()), (1, expert[:, 0]), (1, expert[:39]), (2, weight.double()), (2, weight[:, :1]),
        ]:  # fmt: skip
            given = [bad if i == place else tensor for i, tensor in enumerate(good)]
            with pytest.raises(ValueError, match=r"expected .*; got "):
                forward(mine, None, *given, workers, save="nothing")
        _, cache = forward(mine, None, *good, workers, save="h")
        assert isinstance(cache, NodeCache)
        for bad in (layer.dy_TH.float(), layer.dy_TH[:39], layer.dy_TH[:, :95]):
            with pytest.raises(ValueError, match=r"expected .*; got "):
                backward(mine, None, cache, bad, workers, ALL)

    def test_weights_that_do_not_go_together(self) -> None:
        up, down = PackedWeights.pack(torch.randn(2, 64, 48)), PackedWeights.pack(torch.randn(2, 48, 32))
        NodeExperts(up, down, None, None, Activation())
        for wrong in (
            lambda: NodeExperts(up, down, None, None, Activation("relu", gated=False)),
            lambda: NodeExperts(up, PackedWeights.pack(torch.randn(2, 48, 32), "int8"), None, None, Activation()),
            lambda: NodeExperts(up, down, torch.zeros(2, 63), None, Activation()),
            lambda: NodeExperts(up, down, None, torch.zeros(2, 48).double(), Activation()),
        ):
            with pytest.raises(ValueError, match=r"expected .*; got "):
                wrong()

    def test_factors_that_do_not_fit(self, workers: WorkerPool) -> None:
        layer = Layer()
        mine, six = layer.node(), layer.lora.tensors()
        for changed in (
            {"gate_lora_b": None},
            {"down_lora_a": six["down_lora_a"][:, :, :63]},
            {"up_lora_a": six["up_lora_a"][:4]},
            {"up_lora_b": six["up_lora_b"].double()},
        ):
            with pytest.raises(ValueError, match=r"expected .*; got "):
                NodeFactors.pack(mine, LoraFactors(**(six | changed)), workers)
        other = replace(layer, expert_TK=None).node()
        with pytest.raises(ValueError, match="another node"):
            forward(
                other, NodeFactors.pack(mine, layer.lora, workers), layer.x_TH, layer.expert_TK, layer.weight_TK,
                workers, save="nothing",
            )  # fmt: skip
