"""Streamed experts give the numbers of the same experts resident, bit for bit, however few slots there are.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I · R LoRA rank
"""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from test_gpu_streamed_experts import FailingStore
from torch import Tensor

from amoeba import Activation, ExpertWeights, LoraFactors, Request, Routing, experts, explain
from amoeba.backends import cpu, cpu_fused
from amoeba.backends.backend import RowsApart
from amoeba.core.weights import LORA_NAMES
from amoeba.cpu.core import why_no_core
from amoeba.precision.formats import FP8_128, MXFP4
from amoeba.precision.quantised_experts import quantise_experts
from amoeba.stream.cpu.memory import ExpertMemory
from amoeba.stream.placement import MemoryStore, stream_from_memory
from selection import each_value_once, quick

E, K, H, I, R = 6, 3, 40, 48, 3  # K: of two numbers the order does not matter
SLOTS = (1, 2, E // 2, E)
CLAMPED = Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0)


def weights_of(dtype: torch.dtype, activation: Activation | None = None, bias: bool = False) -> ExpertWeights:
    activation = activation or Activation()
    generator = torch.Generator().manual_seed(1)
    width = activation.width(I)
    shapes = [(E, width, H), (E, H, I), *([(E, width), (E, H)] if bias else [])]
    drawn = [(torch.randn(shape, generator=generator) * 0.2).to(dtype) for shape in shapes]
    return ExpertWeights(*drawn, *([None, None] if not bias else []), activation)


def routed(tokens: int, dtype: torch.dtype, sentinels: bool = False) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, H, generator=generator).to(dtype)
    expert_TK = torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices
    if sentinels:
        expert_TK[0, 0], expert_TK[-1, -1] = -1, E
    return x_TH, Routing(expert_TK, torch.rand(tokens, K, generator=generator))


def factors(dtype: torch.dtype) -> LoraFactors:
    generator = torch.Generator().manual_seed(2)
    shapes = [(E, R, H), (E, I, R), (E, R, H), (E, I, R), (E, R, I), (E, H, R)]
    drawn = [(torch.randn(s, generator=generator) * 0.2).to(dtype).requires_grad_() for s in shapes]
    return LoraFactors(*drawn, scaling=0.5)


@pytest.fixture(params=["cpu", "eager", "fused"])
def way(request, monkeypatch) -> str:
    """Each way in which a CPU computes resident experts; which one it is depends on the machine."""
    if request.param == "eager":
        monkeypatch.setattr(cpu.CpuBackend, "why_not", lambda self, request: "is left out by a test")
    elif why_no_core() is not None:
        pytest.skip("needs a C++ compiler")
    else:
        monkeypatch.setattr(cpu_fused, "_multiplies_bf16", lambda: request.param == "fused")
    return request.param


@quick(lambda kind, dtype: dtype == {"silu": torch.float16, "gpt_oss": torch.bfloat16}.get(kind, torch.float32))
@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "bias", "gpt_oss", "relu2"])
def test_outputs_are_those_of_resident_experts(way: str, kind: str, dtype: torch.dtype) -> None:
    activation = {"gpt_oss": CLAMPED, "relu2": Activation("relu2", gated=False)}.get(kind)
    resident = weights_of(dtype, activation, bias=kind in ("bias", "gpt_oss"))
    for tokens in (0, 1, 4, 7, 8, 120):
        x_TH, routing = routed(tokens, dtype, sentinels=tokens in (4, 7, 120))
        expected = experts(x_TH, routing, resident)
        for slots in SLOTS:
            streamed = stream_from_memory(resident, slots)
            for again in range(2):  # with slots that are empty, and with those that the first pass left
                y_TH = experts(x_TH, routing, streamed)
                if way == "eager" and dtype == torch.float32:  # BLAS: its last bits depend on where a matrix lies
                    torch.testing.assert_close(y_TH, expected, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(y_TH, expected), (tokens, slots, again)


@quick(lambda dtype, recompute: recompute == (dtype == torch.bfloat16))
@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_lora_gradients_are_those_next_to_resident_experts(way: str, dtype: torch.dtype, recompute: bool) -> None:
    resident = weights_of(dtype, bias=True)
    for tokens in (1, 7, 90):
        x_TH, routing = routed(tokens, dtype, sentinels=tokens == 7)
        dy_TH = torch.randn(tokens, H, generator=torch.Generator().manual_seed(3)).to(dtype)
        expected = gradients(resident, x_TH, routing, dy_TH, recompute)
        for slots in (1, E // 2, E):
            found = gradients(stream_from_memory(resident, slots), x_TH, routing, dy_TH, recompute)
            assert found.keys() == expected.keys() >= {"x", "weight", *LORA_NAMES}
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (name, tokens, slots)


@each_value_once()
@pytest.mark.parametrize("format", [FP8_128, MXFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_codes_give_outputs_and_gradients_of_resident_ones(fused, dtype, format, monkeypatch):
    if fused and why_no_core() is not None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(cpu_fused, "_multiplies_bf16", lambda: fused)
    resident = quantise_experts(weights_of(dtype, bias=True), format)
    for tokens in (1, 7, 90):
        x_TH, routing = routed(tokens, dtype, sentinels=tokens == 7)
        dy_TH = torch.randn(tokens, H, generator=torch.Generator().manual_seed(3)).to(dtype)
        with torch.no_grad():
            without_gradients = experts(x_TH, routing, resident)
        expected = gradients(resident, x_TH, routing, dy_TH, False)
        for slots in (1, E // 2, E):
            streamed = stream_from_memory(resident, slots)
            with torch.no_grad():
                assert torch.equal(experts(x_TH, routing, streamed), without_gradients), (tokens, slots)
            found = gradients(streamed, x_TH, routing, dy_TH, False)
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (name, tokens, slots)


def gradients(weights, x_TH: Tensor, routing: Routing, dy_TH: Tensor, recompute: bool) -> dict[str, Tensor]:
    lora, x, weight = factors(dy_TH.dtype), x_TH.clone().requires_grad_(), routing.weight_TK.clone().requires_grad_()
    y_TH = experts(x, Routing(routing.expert_TK, weight), weights, lora=lora, recompute=recompute)
    named = {"x": x, "weight": weight, **lora.tensors()}
    found = torch.autograd.grad(y_TH, list(named.values()), dy_TH)
    return {"output": y_TH.detach(), **dict(zip(named, found, strict=True))}


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_that_several_threads_divide_is_the_same(way: str, dtype: torch.dtype) -> None:
    """torch gives each thread a share of all rows, and ends its vectors where a share ends."""
    if way == "eager":
        pytest.skip("the activation is torch's own there")
    resident, threads = weights_of(dtype), torch.get_num_threads()
    x_TH, routing = routed(1201, dtype)
    torch.set_num_threads(5)  # shares that end in the middle of a row
    try:
        expected = experts(x_TH, routing, resident)
        for slots in (1, 2, E):
            assert torch.equal(experts(x_TH, routing, stream_from_memory(resident, slots)), expected)
    finally:
        torch.set_num_threads(threads)


def test_an_adapter_without_gradients_gives_the_same(way: str) -> None:
    resident, lora = weights_of(torch.bfloat16), factors(torch.float32)
    with torch.no_grad():
        for tokens in (1, 7, 300):
            x_TH, routing = routed(tokens, torch.bfloat16, sentinels=tokens == 7)
            expected = experts(x_TH, routing, resident, lora=lora)
            for slots in (1, E):
                assert torch.equal(experts(x_TH, routing, stream_from_memory(resident, slots), lora=lora), expected)


def test_it_is_explained_and_compiled() -> None:
    torch.compiler.reset()
    streamed = stream_from_memory(weights_of(torch.float32), 2)
    x_TH, routing = routed(7, torch.float32)
    explanation = explain(Request(x_TH, routing, streamed))
    assert explanation.backend is not None and explanation.backend.name == "streamed"
    compiled = torch.compile(lambda x: experts(x * 2, routing, streamed) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x_TH), experts(x_TH * 2, routing, streamed) + 1)


def test_slots_are_one_piece_of_memory_and_nothing_else_is_allocated(monkeypatch) -> None:
    from amoeba.stream.cpu import memory

    sizes: list[int] = []
    aligned = memory.aligned_buffer
    monkeypatch.setattr(memory, "aligned_buffer", lambda size: sizes.append(size) or aligned(size))
    store = MemoryStore(weights_of(torch.bfloat16))
    found = ExpertMemory(store, [2])
    for tokens in (1, 300):
        x_TH, routing = routed(tokens, torch.bfloat16)
        experts(x_TH, routing, found.layers[0])
    assert sizes == [2 * store.expert_bytes(0)] == [found.slot_bytes]
    slots = found.layers[0].slots
    assert slots.gate_up_EJH.stride(0) * 2 == slots.down_EHI.stride(0) * 2 == store.expert_bytes(0)
    assert {t.untyped_storage().data_ptr() for t in (slots.gate_up_EJH, slots.down_EHI)} == {
        found._blobs[0].untyped_storage().data_ptr()
    }


def test_another_dtype_is_refused() -> None:
    streamed = stream_from_memory(weights_of(torch.bfloat16), 2)
    x_TH, routing = routed(3, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        experts(x_TH, routing, streamed)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="as the store has these experts"):
        experts(x_TH, routing, streamed)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3, E])
def test_after_a_failed_read_slots_are_free_and_the_next_try_is_right(slots: int) -> None:
    resident = weights_of(torch.float32)
    for failing in ({2}, {0, 3, 5}, set(range(E))):
        store = FailingStore(resident)
        store.failing = set(failing)
        memory = ExpertMemory(store, [slots])
        x_TH, routing = routed(40, torch.float32)
        for _ in range(2):
            with pytest.raises(OSError, match="cannot be read"):
                experts(x_TH, routing, memory.layers[0])
            assert not set(memory.cache.top(0).slot_of) & store.failing
        store.failing.clear()
        assert torch.equal(experts(x_TH, routing, memory.layers[0]), experts(x_TH, routing, resident))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_a_pass_that_is_broken_off_leaves_nothing_behind(stop: type[BaseException], monkeypatch) -> None:
    resident = weights_of(torch.float32)
    memory = ExpertMemory(MemoryStore(resident), [3])
    x_TH, routing = routed(40, torch.float32)

    def broken(*_: object) -> Callable:
        raise stop

    with monkeypatch.context() as patched:
        patched.setattr(cpu.CpuBackend, "rows_apart", lambda *_: RowsApart(broken, broken, broken))
        patched.setattr("amoeba.backends.eager.EagerBackend.rows_apart", cpu.CpuBackend.rows_apart)
        with pytest.raises(stop):
            experts(x_TH, routing, memory.layers[0])
    assert torch.equal(experts(x_TH, routing, memory.layers[0]), experts(x_TH, routing, resident))
    with closing(memory.acquire(0, range(E), 1)) as groups:
        next(groups)
    assert torch.equal(experts(x_TH, routing, memory.layers[0]), experts(x_TH, routing, resident))


def test_a_closed_memory_says_so_and_an_abandoned_read_is_not_computed_with() -> None:
    memory = ExpertMemory(MemoryStore(weights_of(torch.float32)), [3])
    memory.cache.request(0, [4])  # a read that nobody will end
    memory.cache.release(0, [4])
    with pytest.raises(RuntimeError, match=r"\[4\] were abandoned"), closing(memory.acquire(0, [1, 4], 1)) as groups:
        next(groups)
    memory.close()
    x_TH, routing = routed(1, torch.float32)
    with pytest.raises(ValueError, match="Attach the model again"):
        experts(x_TH, routing, memory.layers[0])


def test_passes_of_several_threads_take_turns() -> None:
    from concurrent.futures import ThreadPoolExecutor

    resident = weights_of(torch.float32)
    streamed = stream_from_memory(resident, 2)
    inputs = [routed(tokens, torch.float32) for tokens in (1, 5, 30, 200) * 4]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda given: experts(*given, streamed), inputs))
    for y_TH, given in zip(found, inputs, strict=True):
        assert torch.equal(y_TH, experts(*given, resident))
