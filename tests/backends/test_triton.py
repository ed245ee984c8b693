"""What is special about the backend `triton`: when h is overwritten, which way a pass goes, and what it refuses.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

That its numbers are right is proven by test_conformance.py.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amoeba import Routing, experts
from amoeba.backends import triton, triton_rows
from amoeba.backends.backend import Request
from amoeba.backends.registry import backends_of, choose
from amoeba.core.problem import Needs, Problem, Saved
from amoeba.core.weights import LORA_NAMES, ExpertWeights, LoraFactors
from amoeba.kernels import decode
from amoeba.proof.cases import Case, example, lora_of, weights_of
from selection import each_value_once
from small_layer import E, I, K, Layer, kernel_device

CUDA = torch.device("cuda")
DEVICE = kernel_device()
ALL = [True] * 6 + [False] * 6


def layer_here(**options: Any) -> Layer:
    """A small layer where the kernels run."""
    return Layer(**options).to(DEVICE)


def problem_of(layer: Layer) -> Problem:
    named = {name: tensor.detach() for name, tensor in layer.tensors.items()}
    return Problem(named["x"], layer.expert_TK, named["weight"], layer.weights(named))


def arguments(layer: Layer) -> tuple:
    """As the dispatched operators take them."""
    a = layer.activation
    return (*problem_of(layer).tensors(), a.kind, a.gated, a.alpha, a.limit, a.up_shift, a.interleaved, 1.0)


def run(layer: Layer, recompute: bool = False) -> tuple[Tensor, list[Tensor]]:
    """y, and what is kept for the backward pass that was not there before."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    named = layer.tensors
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        routing = Routing(layer.expert_TK, named["weight"])
        y_TH = experts(named["x"], routing, layer.weights(named), backend="triton", recompute=recompute)
    inputs = {tensor.data_ptr() for tensor in (*named.values(), layer.expert_TK)}
    return y_TH, [tensor for pointer, tensor in kept.items() if pointer not in inputs and tensor.numel()]


def gradients(layer: Layer, y_TH: Tensor, retain_graph: bool) -> list[Tensor]:
    return list(torch.autograd.grad(y_TH, list(layer.tensors.values()), layer.dy_TH, retain_graph=retain_graph))


class TestH:
    """dh takes the place of h where nobody will read h again, and only there."""

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_kept_graph_gives_the_same_gradients_again_and_again(self, recompute: bool) -> None:
        layer = layer_here()
        y_TH, _ = run(layer, recompute)
        first = gradients(layer, y_TH, retain_graph=True)
        for retain_graph in (True, False):
            again = gradients(layer, y_TH, retain_graph)
            for name, one, other in zip(layer.tensors, first, again, strict=True):
                assert torch.equal(one, other), name

    def test_it_is_left_alone_while_the_graph_is_kept_and_reused_at_the_end(self) -> None:
        layer = layer_here()
        y_TH, kept = run(layer)
        (h_NJ,) = (tensor for tensor in kept if tensor.shape == (layer.expert_TK.numel(), 2 * I))
        before = h_NJ.clone()
        gradients(layer, y_TH, retain_graph=True)
        assert torch.equal(h_NJ, before)
        gradients(layer, y_TH, retain_graph=False)
        assert not torch.equal(h_NJ, before), "a second buffer as large as h was allocated"

    @pytest.mark.parametrize("dispatched", [True, False])
    def test_a_backward_called_outside_autograd_leaves_it_alone(self, dispatched: bool) -> None:
        layer = layer_here()
        _, saved = triton.BACKEND.forward(problem_of(layer), "h")
        before = saved.h_NJ.clone()
        for _ in range(2):
            if dispatched:
                torch.ops.amoeba.triton_backward(*arguments(layer), True, *saved, layer.dy_TH, ALL)
            else:
                triton.BACKEND.backward(problem_of(layer), saved, layer.dy_TH, Needs(*ALL))
            assert torch.equal(saved.h_NJ, before)


class TestMaps:
    @pytest.mark.parametrize("save_h", [True, False])
    def test_they_are_int32_and_the_fake_says_so_too(self, save_h: bool) -> None:
        layer = layer_here(tokens=5)
        given = arguments(layer)
        real = torch.ops.amoeba.triton(*given, save_h)
        with FakeTensorMode() as mode:
            given = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given)
            fake = torch.ops.amoeba.triton(*given, save_h)
        assert [tensor.dtype for tensor in real[2:5]] == [torch.int32] * 3
        assert [(t.dtype, t.shape) for t in real] == [(t.dtype, t.shape) for t in fake]
        assert [tensor.numel() for tensor in real[2:]] == ([5 * K, 5 * K, E, 0, 0] if save_h else [0] * 5)


class TestLowRank:
    """What LoRA's passes save and launch."""

    @each_value_once()
    @pytest.mark.parametrize("tokens", [5, 0])
    @pytest.mark.parametrize(("shared", "width"), [(False, 32), (True, 16)])
    def test_thin_rows_are_saved_padded_and_the_fake_says_so_too(self, tokens: int, shared: bool, width: int) -> None:
        """Ranks of gate and up are 9 + 9, or 9 where they share their A, which is an argument once then."""
        layer = layer_here(tokens=tokens, rank=9)
        named = {name: layer.tensors[name].detach() for name in LORA_NAMES}
        named |= {"up_lora_a": named["gate_lora_a"]} if shared else {}
        problem = problem_of(layer)._replace(lora=LoraFactors(**named))
        factors = problem.tensors()[-len(LORA_NAMES) :]
        assert (factors[2] is None) == shared
        given = (*arguments(layer)[:-1], 2.0)
        given = tuple(given[:7]) + tuple(factors) + given[13:]
        real = torch.ops.amoeba.triton(*given, True)
        with FakeTensorMode() as mode:
            given = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given)
            fake = torch.ops.amoeba.triton(*given, True)
        assert (real[-2].shape, real[-1].shape) == ((tokens * K, width), (tokens * K, 16))
        assert [(t.dtype, t.shape, t.stride()) for t in real] == [(t.dtype, t.shape, t.stride()) for t in fake]

    @pytest.mark.parametrize("rank", [1, 15, 60])
    def test_every_rank(self, rank: int) -> None:
        """Two of 15 are joined to 30, nearly the most that `lora_backward` takes in fp32; 60 has passes of its own."""
        layer = layer_here(tokens=6, rank=rank)
        found, expected = layer.gradients("triton"), layer.gradients("eager")
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 1e-5, (name, float(error))


class TestWhichWay:
    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The kernels that were called, by name."""
        names: list[str] = []
        real_decode, real_up = decode.decode, triton_rows.TritonRows.up

        def note_decode(problem: Problem) -> Tensor:
            names.append("decode")
            return real_decode(problem)

        def note_up(self: triton_rows.TritonRows, want_h: bool) -> tuple[Tensor | None, Tensor]:
            names.append("up keeping h" if want_h else "up")
            return real_up(self, want_h)

        monkeypatch.setattr(decode, "decode", note_decode)
        monkeypatch.setattr(triton_rows.TritonRows, "up", note_up)
        return names

    @pytest.mark.parametrize(("tokens", "expected"), [(1, "decode"), (3, "decode"), (4, "up")])
    def test_few_tokens_without_gradients_are_decoded(self, taken, tokens, expected, monkeypatch):
        monkeypatch.setattr(triton, "DECODE_TOKENS", 3)
        layer = layer_here(tokens=tokens)
        with torch.no_grad():
            y_TH, _ = run(layer)
        assert taken == [expected]
        torch.testing.assert_close(y_TH, run(layer)[0].detach())
        assert taken == [expected, "up keeping h"]

    def test_few_tokens_with_factors_are_decoded_and_the_factors_not_copied(self, taken, monkeypatch):
        case = Case(3, 2, lora="all", rank=5)
        made = example(case, torch.float16)
        tensors = {name: tensor.to(DEVICE, torch.float16) for name, tensor in made.inputs.items()}
        lora = lora_of({name: tensor.float() for name, tensor in tensors.items()})
        routing = Routing(made.expert_TK.to(DEVICE), tensors["weight"].float())
        arguments = tensors["x"], routing, weights_of(tensors, case.activation)
        y_TH = experts(*arguments, lora=lora.to(torch.float16), backend="triton")
        monkeypatch.setattr(LoraFactors, "to", None)
        assert torch.equal(experts(*arguments, lora=lora, backend="triton"), y_TH)
        assert taken == ["decode", "decode"]


class TestRegistry:
    def request(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Request:
        layer = Layer()
        named = {name: tensor.detach().to(dtype) for name, tensor in layer.tensors.items()}
        request = Request(named["x"], Routing(layer.expert_TK, named["weight"]), layer.weights(named))
        if device is None:
            return request
        weights: Any = SimpleNamespace(dtype=dtype, device=device, placement="resident")
        return replace(request, weights=weights)

    def why_not(self, request: Request) -> str | None:
        (backend,) = (b for b in backends_of(ExpertWeights, request.weights.device) if b.name == "triton")
        return backend.why_not(request)

    def test_it_is_the_first_choice_on_a_gpu_and_the_last_on_a_cpu(self) -> None:
        assert backends_of(ExpertWeights, CUDA)[0].name == "triton"
        names = [backend.name for backend in backends_of(ExpertWeights, torch.device("cpu"))]
        assert [name for name in names if name != "tasks"][-1] == "triton"  # tasks: once it was asked for by name

    def test_on_a_cpu_it_needs_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert self.why_not(self.request()) == (
            "computes on a CUDA device (or in Triton's interpreter); these weights are on cpu"
        )
        with pytest.raises(ValueError, match=r"triton does not.*computes on a CUDA device.*Use backend=\"auto\""):
            choose("triton", self.request())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_interpreter_serves_all_but_bf16(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        reason = self.why_not(self.request(dtype))
        if dtype == torch.bfloat16:
            assert reason == "Triton's interpreter computes wrong bf16 products"
        else:
            assert reason is None

    @pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=str)
    def test_fp64_is_refused(self, device, gpu_of, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        gpu_of(9, 0)
        assert self.why_not(self.request(torch.float64, device)) == (
            "supports bf16, fp16 and fp32; these weights are torch.float64"
        )

    def test_without_triton_it_is_refused(self, gpu_of, monkeypatch):
        gpu_of(9, 0)
        monkeypatch.setattr(triton, "_TRITON_FOUND", False)
        assert self.why_not(self.request(torch.bfloat16, CUDA)) == "needs Triton, which is not installed"

    @pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
    def test_old_gpus_are_refused(self, capability, served, gpu_of):
        gpu_of(*capability)
        reason = self.why_not(self.request(torch.bfloat16, CUDA))
        assert reason == (None if served else "needs compute capability 8.0 or newer")


class TestHopper:
    """Which problems go to the kernels for Hopper, told without one."""

    def problem(self, hidden: int = 128, inner: int = 64, dtype: torch.dtype = torch.bfloat16) -> Problem:
        x_TH: Any = SimpleNamespace(
            device=CUDA, dtype=dtype, shape=(5, hidden), stride=(hidden, 1).__getitem__, data_ptr=lambda: 0
        )
        gate_up_EJH, down_EHI = (
            torch.zeros(shape, dtype=dtype) for shape in ((E, 2 * inner, hidden), (E, hidden, inner))
        )
        expert_TK = torch.zeros(5, K, dtype=torch.int64)
        return Problem(x_TH, expert_TK, torch.ones(5, K), ExpertWeights(gate_up_EJH, down_EHI))

    @pytest.fixture(autouse=True)
    def _hopper(self, gpu_of) -> None:
        gpu_of(9, 0)

    def test_multiples_of_64_in_half_precision_do_in_either_storage(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            problem = self.problem(dtype=dtype)
            assert triton_rows.why_not_hopper(problem) is None
            turned = problem.weights.gate_up_EJH.transpose(1, 2).contiguous().transpose(1, 2)
            weights = replace(problem.weights, gate_up_EJH=turned)
            assert triton_rows.why_not_hopper(problem._replace(weights=weights)) is None
            saved = Saved(*(torch.zeros(1, dtype=torch.int32) for _ in Saved._fields))
            assert type(triton_rows.TritonRows.dispatch(problem, saved)) is triton_rows.HopperRows

    def test_rows_are_copied_where_16_bytes_at_a_time_cannot_be_read(self) -> None:
        memory = torch.zeros(5 * 80 + 1, dtype=torch.bfloat16)
        whole, shifted = memory[:-1].view(5, 80), memory[1:].view(5, 80)
        cases = {"whole": whole, "wide rows": whole[:, :64], "shifted": shifted, "odd stride": memory[:360].view(5, 72)}
        cases |= {"turned": torch.zeros(64, 5, dtype=torch.bfloat16).t()}
        copied = {name for name, rows in cases.items() if triton_rows.in_whole_pieces(rows) is not rows}
        assert copied == {"shifted", "odd stride", "turned"}
        for rows in cases.values():
            found = triton_rows.in_whole_pieces(rows)
            assert found.data_ptr() % 16 == 0 and found.stride(1) == 1 and torch.equal(found, rows)

    @pytest.mark.parametrize(
        ("sizes", "reason"),
        [
            ({"hidden": 96}, "H to be a multiple of 64; it is 96"),
            ({"inner": 32}, "I to be a multiple of 64; it is 32"),
            ({"dtype": torch.float32}, "x is torch.float32"),
        ],
    )
    def test_other_sizes_and_dtypes_do_not(self, sizes: dict[str, Any], reason: str) -> None:
        assert reason in str(triton_rows.why_not_hopper(self.problem(**sizes)))

    def test_weights_that_the_copy_engine_cannot_read_do_not(self) -> None:
        problem = self.problem()
        apart = torch.zeros(E, 128, 256, dtype=torch.bfloat16)[:, :, ::2]
        shifted = torch.zeros(E * 128 * 64 + 1, dtype=torch.bfloat16)[1:].view(E, 128, 64)
        assert "gate_up to be contiguous" in str(
            triton_rows.why_not_hopper(problem._replace(weights=replace(problem.weights, gate_up_EJH=apart)))
        )
        assert "down to be contiguous" in str(
            triton_rows.why_not_hopper(problem._replace(weights=replace(problem.weights, down_EHI=shifted)))
        )

    def test_other_gpus_do_not(self, gpu_of):
        for capability in ((8, 0), (10, 0)):
            gpu_of(*capability)
            assert "needs a Hopper GPU" in str(triton_rows.why_not_hopper(self.problem()))
