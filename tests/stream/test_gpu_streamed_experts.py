"""Experts in slots on a device give the numbers of the same experts resident, however few slots there are.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank

On a machine without a GPU a simulated device stands for it, whose copies come late, and Triton's interpreter computes.
"""

from collections.abc import Collection
from contextlib import closing

import pytest
import torch
from simulated_device import SimulatedDevice
from torch import Tensor

from amoeba import ExpertWeights, LoraFactors, Request, Routing, experts, explain
from amoeba.core.weights import LORA_NAMES
from amoeba.stream.gpu import backend
from amoeba.stream.gpu.device import CudaDevice, Device
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MOST_IDS, MemoryStore
from selection import quick, without_a_gpu_thorough

E, K, H, I, R = 6, 3, 32, 16, 3  # K: of two numbers the order does not matter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes wrong bf16 products
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def device(seed: int = 0, **options) -> Device:
    return CudaDevice(DEVICE) if DEVICE.type == "cuda" else SimulatedDevice(seed, inline=True, **options)


def weights_of(dtype: torch.dtype = torch.float32, bias: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    shapes = [(E, 2 * I, H), (E, H, I), *([(E, 2 * I), (E, H)] if bias else [])]
    return ExpertWeights(*[(torch.randn(s, generator=generator) * 0.2).to(DEVICE, dtype) for s in shapes])


def routed(tokens: int, dtype: torch.dtype = torch.float32, sentinels: bool = False) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, H, generator=generator).to(DEVICE, dtype)
    expert_TK = torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices
    weight_TK = torch.rand(tokens, K, generator=generator)
    if sentinels:
        expert_TK[0, 0], expert_TK[-1, -1] = -1, E
        weight_TK[0, 0] = float("nan")  # nobody's
    return x_TH, Routing(expert_TK.to(DEVICE), weight_TK.to(DEVICE), trusted=True)


def factors(dtype: torch.dtype, shared: bool = False) -> LoraFactors:
    """shared: gate and up have one A."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(E, R, H), (E, I, R), (E, R, H), (E, I, R), (E, R, I), (E, H, R)]
    drawn = [(torch.randn(s, generator=generator) * 0.2).to(DEVICE, dtype).requires_grad_() for s in shapes]
    if shared:
        drawn[2] = drawn[0]
    return LoraFactors(*drawn, scaling=0.5)


def memory_of(
    resident: ExpertWeights, slots: int, host_slots: int = 0, store: type[MemoryStore] = MemoryStore, **options
) -> DeviceMemory:
    """With slots that hold NaN."""
    found = DeviceMemory(store(resident), device(**options), [slots], [host_slots], MOST_IDS)
    for tensor in found.layers[0].slots.tensors():
        if tensor is not None:
            tensor.fill_(float("nan"))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # before copies, which are in another stream
    return found


def assert_as_resident(y_TH: Tensor, expected_TH: Tensor, slots: int, told: object) -> None:
    if y_TH.shape[0] <= 4 and slots < K:  # one token's experts do not fit: another order of summation
        accuracy = 1e-5 if y_TH.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y_TH, expected_TH, rtol=accuracy, atol=accuracy)
    else:
        assert torch.equal(y_TH, expected_TH), (y_TH.shape[0], told)


def by_triton(*arguments, **options) -> Tensor:
    return experts(*arguments, backend="triton", **options)


@quick(lambda slots: DEVICE.type == "cuda" or slots in (1, 3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 2, 3, E])
def test_outputs_are_those_of_resident_experts(slots: int, dtype: torch.dtype) -> None:
    resident = weights_of(dtype, bias=True)
    for host_slots in (0,) if slots == 1 else (2,):
        with closing(memory_of(resident, slots, host_slots)) as memory:
            for tokens in (0, 1, 3, 7, 1, 66) if slots == 3 or DEVICE.type == "cuda" else (1, 7):
                x_TH, routing = routed(tokens, dtype, sentinels=tokens in (7, 66))
                with torch.no_grad():
                    expected = by_triton(x_TH, routing, resident)
                    for again in range(2 if tokens < 66 else 1):
                        y_TH = experts(x_TH, routing, memory.layers[0])
                        assert_as_resident(y_TH, expected, slots, (host_slots, again))


@quick(lambda slots: DEVICE.type == "cuda" or slots == 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 4, E])
def test_lora_gradients_are_those_next_to_resident_experts(slots: int, dtype: torch.dtype) -> None:
    resident, shared = weights_of(dtype, bias=True), slots == 4
    with closing(memory_of(resident, slots, 3)) as memory:
        for tokens, recompute in ((1, False), (7, True)) if slots < E else ((23, False),):
            x_TH, routing = routed(tokens, dtype, sentinels=tokens == 7)
            dy_TH = torch.randn(tokens, H, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
            expected = gradients(resident, x_TH, routing, dy_TH, shared, backend="triton", recompute=recompute)
            found = gradients(memory.layers[0], x_TH, routing, dy_TH, shared, recompute=recompute)
            assert found.keys() == expected.keys() >= {"x", "weight", *LORA_NAMES}
            for name, tensor in expected.items():
                if name == "output" and recompute and slots < K:
                    continue  # as without gradients
                assert torch.equal(found[name], tensor), (name, tokens)


def gradients(
    weights, x_TH: Tensor, routing: Routing, dy_TH: Tensor, shared: bool, compute=experts, **options
) -> dict[str, Tensor]:
    x, weight = (each.clone().requires_grad_() for each in (x_TH, routing.weight_TK))
    lora = factors(dy_TH.dtype, shared)
    y_TH = compute(x, Routing(routing.expert_TK, weight, trusted=True), weights, lora=lora, **options)
    named = {"x": x, "weight": weight, **lora.tensors()}
    found = torch.autograd.grad(y_TH, list(named.values()), dy_TH)
    return {"output": y_TH.detach(), **dict(zip(named, found, strict=True))}


@without_a_gpu_thorough
def test_a_compiled_backward_streams_once_as_any_other(monkeypatch) -> None:
    """Nothing is saved between the passes, so there is no forward to repeat ahead of it."""
    streamed: list[int] = []
    groups = backend._groups
    monkeypatch.setattr(backend, "_groups", lambda problem: (streamed.append(1), groups(problem))[1])
    with closing(memory_of(weights_of(), 4, 3)) as memory:
        x_TH, routing = routed(7)
        dy_TH = torch.ones_like(x_TH)
        expected = gradients(memory.layers[0], x_TH, routing, dy_TH, shared=False)
        directly = len(streamed)
        compute = torch.compile(experts, backend="aot_eager", fullgraph=True)
        found = gradients(memory.layers[0], x_TH, routing, dy_TH, shared=False, compute=compute)
    assert directly == 2 and len(streamed) == 3  # compiled, the forward of so few tokens decodes
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name != "output")


def test_a_graph_holds_a_forward_of_streamed_experts_and_no_training() -> None:
    with closing(memory_of(weights_of(), 4)) as memory:
        request = Request(*routed(1), memory.layers[0])
        serving = explain(request).backend
        assert serving.why_waits(request, trains=False) is None and request.weights.replays is not None
        told = "are streamed, and in training the host copies them group by group"
        assert serving.why_waits(request, trains=True) == told


def test_hits_are_counted_and_what_is_there_is_not_loaded_again() -> None:
    with torch.no_grad(), closing(memory_of(weights_of(), 4)) as memory:
        x_TH, routing = routed(1)
        for _ in range(3):
            experts(x_TH, routing, memory.layers[0])
        counters = memory.cache.counters
        assert (counters.tokens, counters.requested, counters.hits) == (3, 3 * K, 2 * K)
        assert counters.from_disk == K


def test_a_layer_whose_experts_are_all_there_never_waits_for_its_ids() -> None:
    resident = weights_of()
    with torch.no_grad(), closing(memory_of(resident, E)) as memory:
        experts(*routed(66), memory.layers[0])
        waited = memory.waited_seconds
        for tokens in (1, 1, 5):
            x_TH, routing = routed(tokens)
            assert torch.equal(experts(x_TH, routing, memory.layers[0]), by_triton(x_TH, routing, resident))
        assert memory.waited_seconds == waited and memory.pool.is_complete(0)
        if isinstance(memory.device, SimulatedDevice):
            memory.device.waits.clear()
            experts(*routed(1), memory.layers[0])
            assert "compute" not in memory.device.waits
        assert memory.cache.counters.hits >= 2 * K  # of passes whose rows had come by the next


def test_it_is_explained() -> None:
    with closing(memory_of(weights_of(), 2)) as memory:
        x_TH, routing = routed(7)
        explanation = explain(Request(x_TH, routing, memory.layers[0]))
        assert explanation.backend is not None and explanation.backend.name == "streamed"


# --- faults -----------------------------------------------------------------------------------------------------------


class FailingStore(MemoryStore):
    """Reads of some experts fail until they are mended."""

    failing: Collection[int] = ()

    def _read(self, layer: int, expert: int, memory) -> None:
        memory.tensor.fill_(255)  # half of a read: NaN
        if expert in self.failing:
            raise OSError(f"expert {expert} cannot be read")
        super()._read(layer, expert, memory)


@quick(lambda slots, tokens: DEVICE.type == "cuda" or (slots, tokens) == (3, 1))
@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (3, 1), (3, 66), (E, 66)])
def test_after_a_failed_read_slots_are_free_and_the_next_try_is_right(slots: int, tokens: int) -> None:
    resident = weights_of()
    x_TH, routing = routed(tokens)
    first = int(routing.expert_TK[0, 0])
    for failing in ({first}, set(range(E))) if tokens == 1 else ({first},):
        with torch.no_grad(), closing(memory_of(resident, slots, 2, FailingStore)) as memory:
            memory.store.failing = frozenset(failing)
            for _ in range(2):
                with pytest.raises(OSError, match="cannot be read"):
                    experts(x_TH, routing, memory.layers[0])
                assert not set(memory.cache.top(0).slot_of) & failing
            memory.store.failing = frozenset()
            torch.testing.assert_close(
                experts(x_TH, routing, memory.layers[0]), by_triton(x_TH, routing, resident), rtol=1e-5, atol=1e-5
            )


# --- on a GPU alone ---------------------------------------------------------------------------------------------------


def wide(experts: int, hidden: int = 256, inner: int = 128) -> ExpertWeights:
    """Of widths for which Hopper has kernels of its own."""
    generator = torch.Generator().manual_seed(4)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    return ExpertWeights(*[(torch.randn(s, generator=generator) * 0.05).to(DEVICE, torch.bfloat16) for s in shapes])


def routed_wide(tokens: int, experts: int, top_k: int, seed: int, hidden: int = 256) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, hidden, generator=generator).to(DEVICE, torch.bfloat16)
    expert_TK = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices
    return x_TH, Routing(expert_TK.to(DEVICE), torch.rand(tokens, top_k, generator=generator).to(DEVICE), trusted=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "slots"), [(32, 8), (32, 9), (32, 20), (32, 32), (128, 8), (128, 40)])
def test_every_way_to_compute_gives_the_resident_bits(count: int, slots: int) -> None:
    """With 128 experts two to four tokens go by slot, with 32 by expert."""
    resident = wide(count)
    with torch.no_grad(), closing(memory_of(resident, slots, 6)) as memory:
        for tokens in (1, 2, 4, 5, 8, 64, 65, 300, 2000):
            for seed in range(3):
                x_TH, routing = routed_wide(tokens, count, 8, seed)
                found = experts(x_TH, routing, memory.layers[0])
                assert torch.equal(found, by_triton(x_TH, routing, resident)), (tokens, seed)


@pytest.mark.gpu
def test_fences_hold_over_many_passes_that_nobody_waits_for() -> None:
    resident = wide(32)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with torch.no_grad(), closing(memory_of(resident, 9, 12)) as memory:
        for seed in range(300):
            x_TH, routing = routed_wide((1, 1, 1, 70)[seed % 4], 32, 8, seed)
            wrong += (experts(x_TH, routing, memory.layers[0]) != by_triton(x_TH, routing, resident)).any()
        assert memory.cache.counters.from_host > 100
    assert int(wrong) == 0


@pytest.mark.gpu
def test_nothing_synchronises_the_device_whether_it_hits_or_misses() -> None:
    resident = wide(32)
    with torch.no_grad(), closing(memory_of(resident, 12, 32)) as memory:
        given = [routed_wide(tokens, 32, 8, seed) for tokens in (1, 4, 200) for seed in range(4)]
        for each in given * 2:  # what is compiled is compiled, and the host has all experts
            experts(*each, memory.layers[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for each in given:
                experts(*each, memory.layers[0])
            for _ in range(3):
                experts(*given[0], memory.layers[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert memory.cache.counters.hits > 0


@pytest.mark.gpu
def test_passes_in_several_streams_take_turns() -> None:
    resident = wide(32)
    streams = [torch.cuda.Stream() for _ in range(3)]
    given = [routed_wide(tokens, 32, 8, seed) for seed, tokens in enumerate((1, 70, 3, 1, 1, 200) * 3)]
    torch.cuda.synchronize()
    with torch.no_grad(), closing(memory_of(resident, 9, 8)) as memory:
        found = []
        for number, each in enumerate(given):
            with torch.cuda.stream(streams[number % 3]):
                found.append(experts(*each, memory.layers[0]))
        torch.cuda.synchronize()
    for y_TH, each in zip(found, given, strict=True):
        assert torch.equal(y_TH, by_triton(*each, resident))
