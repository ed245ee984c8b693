"""Streamed experts captured in a CUDA graph give the numbers of the same experts resident.

On a machine without a GPU threads stand for it, a function that is called again for a graph (simulated_device.py), and
Triton's interpreter computes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from simulated_device import LiveDevice, RepeatedFunction
from test_gpu_streamed_experts import (
    DEVICE,
    DTYPES,
    E,
    FailingStore,
    H,
    I,
    K,
    by_triton,
    factors,
    routed,
    routed_wide,
    weights_of,
    wide,
)
from torch import Tensor

from amoeba import ExpertWeights, LoraFactors, Routing, experts, route
from amoeba.core.config import Activation, RouterConfig
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.memory import DeviceMemory, GpuStreamedExperts
from amoeba.stream.placement import MOST_IDS, MemoryStore
from amoeba.stream.store import compiled_reads
from amoeba.stream.store.layers import layer_entry
from amoeba.stream.store.store import Store
from benchmarks.stream.stores import FileStore
from selection import quick

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


class SameLayers(FailingStore):
    def __init__(self, weights: ExpertWeights, layers: int) -> None:
        MemoryStore.__init__(self, weights)
        self.layers = self.layers * layers


class Captured:
    """A pass over each layer of a memory, in one graph."""

    def __init__(
        self,
        resident: ExpertWeights,
        slots: int,
        host_slots: int,
        given: tuple[Tensor, Routing],
        layers: int = 2,
        lora: LoraFactors | None = None,
        miss: str = "move",
        store: Store | None = None,
    ) -> None:
        self.device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else LiveDevice(inline=True)
        self.store = SameLayers(resident, layers) if store is None else store
        budgets = [slots] * layers, [host_slots] * layers
        self.memory = DeviceMemory(self.store, self.device, *budgets, MOST_IDS, miss=miss)
        self.x_TH, self.lora = given[0].clone(), lora
        self.expert_TK, self.weight_TK = given[1].expert_TK.clone(), given[1].weight_TK.clone()
        self.found: list[Tensor] = []
        try:
            self._replay = self._graph() if DEVICE.type == "cuda" else self._function()
        except BaseException:
            self.memory.close()
            raise

    def _run(self) -> None:
        routing = Routing(self.expert_TK, self.weight_TK, trusted=True)
        with torch.no_grad():
            self.found = [experts(self.x_TH, routing, layer, lora=self.lora) for layer in self.memory.layers]

    def _function(self) -> Callable[[], None]:
        return RepeatedFunction(self.device, self.memory.replays, self._run).replay

    def _graph(self) -> Callable[[], None]:
        replays, graph, stream = self.memory.replays, torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), replays.rehearsing():
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        with replays.capturing() as passes, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._run()
        return lambda: replays.replay(passes, graph.replay)

    def __call__(self, x_TH: Tensor, routing: Routing) -> list[Tensor]:
        """The outputs of all layers."""
        self._wait()
        self.x_TH.copy_(x_TH)
        self.expert_TK.copy_(routing.expert_TK)
        self.weight_TK.copy_(routing.weight_TK)
        self._replay()
        self._wait()
        self.memory.replays.check()
        return [each.clone() for each in self.found]

    def replay_without_waiting(self, given: list[tuple[Tensor, Routing]]) -> None:
        """An error if anything synchronises the device meanwhile."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x_TH, routing in given:
                self.x_TH.copy_(x_TH)
                self.expert_TK.copy_(routing.expert_TK)
                self._replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        self.memory.replays.check()

    def _wait(self) -> None:
        self.device.record(self.device.compute).wait()

    def close(self) -> None:
        self.memory.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("slots", "host_slots"), [(K, 0), (4, 2), (E, 0)])
def test_outputs_are_those_of_resident_experts(slots: int, host_slots: int, dtype: torch.dtype) -> None:
    resident = weights_of(dtype, bias=True)
    with closing(Captured(resident, slots, host_slots, routed(1, dtype))) as captured:
        for seed in range(2):
            x_TH, routing = routed_as(seed, dtype)
            expected = by_triton(x_TH, routing, resident)
            for y_TH in captured(x_TH, routing):
                assert torch.equal(y_TH, expected), seed


def routed_as(seed: int, dtype: torch.dtype) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(1, H, generator=generator).to(DEVICE, dtype)
    expert_TK = torch.rand(1, E, generator=generator).topk(K, dim=1).indices
    return x_TH, Routing(expert_TK.to(DEVICE), torch.rand(1, K, generator=generator).to(DEVICE), trusted=True)


@pytest.mark.parametrize(("tokens", "slots"), [(1, 4), (2, E)])
def test_an_adapter_next_to_them_goes_with_its_experts(tokens: int, slots: int) -> None:
    resident, lora = weights_of(), factors(torch.float32)
    with torch.no_grad(), closing(Captured(resident, slots, 0, routed(tokens), 1, lora)) as captured:
        for given in (routed(tokens, sentinels=True),) if tokens == 2 else (routed(1), routed_as(3, torch.float32)):
            (y_TH,) = captured(*given)
            assert torch.equal(y_TH, by_triton(*given, resident, lora=lora))


def test_after_a_failed_read_the_next_try_is_right() -> None:
    resident = weights_of()
    with closing(Captured(resident, K, 0, routed(1))) as captured:
        given = next(each for seed in range(99) if not asks_alike(each := routed_as(seed, torch.float32), routed(1)))
        captured.store.failing = frozenset(range(E))
        with pytest.raises(OSError, match="cannot be read"):
            captured(*given)
        captured.store.failing = frozenset()
        for y_TH in captured(*given):
            assert torch.equal(y_TH, by_triton(*given, resident))


def asks_alike(one: tuple[Tensor, Routing], other: tuple[Tensor, Routing]) -> bool:
    return set(one[1].expert_TK.flatten().tolist()) == set(other[1].expert_TK.flatten().tolist())


# --- on a GPU alone ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "host_slots"), [(1, 8, 0), (1, 9, 32), (2, 20, 6), (3, 24, 32), (4, 32, 0)]
)
def test_many_replays_give_the_resident_bits(tokens: int, slots: int, host_slots: int) -> None:
    resident = wide(32)
    with torch.no_grad(), closing(Captured(resident, slots, host_slots, routed_wide(tokens, 32, 8, 0), 3)) as captured:
        for seed in range(60):
            given = routed_wide(tokens, 32, 8, seed)
            expected = by_triton(*given, resident)
            for y_TH in captured(*given):
                assert torch.equal(y_TH, expected), seed
            if seed % 10 == 9:  # a prompt in between
                many = routed_wide(200, 32, 8, seed)
                assert torch.equal(experts(*many, captured.memory.layers[1]), by_triton(*many, resident))


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "host_slots"), [(8, 0), (9, 8), (20, 6)])
def test_many_replays_over_files_give_the_resident_bits(slots, host_slots, tmp_path, monkeypatch):
    """Experts that are on the disk go to the GPU without Python (direct_loads.py), in 48 pieces each."""
    monkeypatch.setattr(compiled_reads, "PIECE", 4096)
    resident = wide(32)
    entry = layer_entry("experts", 32, 256, 128, Activation(), torch.bfloat16, False)
    store = FileStore(SimpleNamespace(entry=entry), [resident] * 3, tmp_path)
    if store.place(0, 0) is None or compiled_reads._library() is None:
        pytest.skip("no compiler, or a file system without O_DIRECT")
    first = routed_wide(1, 32, 8, 0)
    with torch.no_grad(), closing(Captured(resident, slots, host_slots, first, 3, store=store)) as captured:
        for seed in range(40):
            given = routed_wide(1, 32, 8, seed)
            expected = by_triton(*given, resident)
            for y_TH in captured(*given):
                assert torch.equal(y_TH, expected), seed
        assert captured.memory.cache.counters.from_disk > 100
    store.end()


@pytest.mark.gpu
def test_threads_with_a_stream_each_share_the_slots_outside_of_graphs() -> None:
    resident = wide(32)
    memory = DeviceMemory(SameLayers(resident, 3), CudaDevice(DEVICE), [12] * 3, [20] * 3, MOST_IDS)

    def run(first: int) -> list[bool]:
        found = []
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(first, first + 40):
                given = routed_wide(1, 32, 8, seed)
                expected = by_triton(*given, resident)
                found += [torch.equal(experts(*given, layer), expected) for layer in memory.layers]
        return found

    run(0)  # first launches compile
    with closing(memory), ThreadPoolExecutor(2) as pool:
        assert all(same for found in pool.map(run, (100, 200)) for same in found)


@pytest.mark.gpu
def test_nothing_synchronises_the_device_while_it_is_replayed() -> None:
    resident = wide(32)
    with torch.no_grad(), closing(Captured(resident, 8, 32, routed_wide(1, 32, 8, 0), 3)) as captured:
        given = [routed_wide(1, 32, 8, seed) for seed in range(20)]
        for each in given:
            captured(*each)
        captured.replay_without_waiting(given)


@pytest.mark.gpu
def test_a_gpu_that_nobody_serves_goes_on_by_itself() -> None:
    resident = wide(32)
    with torch.no_grad(), closing(Captured(resident, 8, 32, routed_wide(1, 32, 8, 0), 2)) as captured:
        captured.memory.replays.mailbox.limit = 0.05
        captured._replay = captured._graph()  # with that limit
        serve = captured.memory.replays.serving.serve
        captured.memory.replays.serving.serve = lambda passes, first: None
        with pytest.raises(RuntimeError, match="continued without them"):
            captured(*routed_wide(1, 32, 8, 1))
        captured.memory.replays.serving.serve = serve
        given = routed_wide(1, 32, 8, 2)
        for y_TH in captured(*given):
            assert torch.equal(y_TH, by_triton(*given, resident))


class CapturedLayers(Captured):
    """Each layer's own router chooses."""

    def __init__(self, *arguments, config: RouterConfig, gates: list[Tensor], **options) -> None:
        self.config, self.gates = config, gates
        super().__init__(*arguments, **options)

    def route(self, layer: GpuStreamedExperts, logits_TE: Tensor) -> Routing:
        """As a fused router does (integrations/fused_routers.py)."""
        found = layer.replays.route(layer.layer, self.x_TH, logits_TE, self.config, None)
        return route(logits_TE, self.config) if found is None else Routing(*found, trusted=True)

    def _run(self) -> None:
        self.found, self.routings = [], []
        with torch.no_grad():
            for layer, gate_EH in zip(self.memory.layers, self.gates, strict=True):
                logits_TE = self.x_TH.float() @ gate_EH.mT
                self.routings.append(self.route(layer, logits_TE))
                self.found.append(experts(self.x_TH, self.routings[-1], layer))


@quick(lambda miss, tokens: (miss, tokens) == ("move", 1) or DEVICE.type == "cuda")
@pytest.mark.parametrize(("miss", "tokens"), [("move", 1), ("move", 2), ("auto", 2), ("cpu", 1)])
def test_a_router_that_asks_gives_the_numbers_of_resident_experts(miss: str, tokens: int) -> None:
    from amoeba.kernels.router import router_forward

    generator, many = torch.Generator().manual_seed(7), 2 * E
    shapes = (many, 2 * I, H), (many, H, I), (many, H), (many, H)
    gate_up, down, *gates = [torch.randn(each, generator=generator).to(DEVICE) for each in shapes]
    resident, config, given = ExpertWeights(gate_up * 0.2, down * 0.2), RouterConfig(many, K), routed(tokens)
    with closing(CapturedLayers(resident, E, many, given, config=config, gates=gates, miss=miss)) as captured:
        mailbox = captured.memory.replays.mailbox
        mailbox.ask = lambda *_: pytest.fail("it asked once more")
        for _ in range(3):
            x_TH = torch.randn(tokens, H, generator=generator).to(DEVICE)
            for y_TH, gate_EH in zip(captured(x_TH, given[1]), gates, strict=True):
                expert_TK, weight_TK, _ = router_forward(x_TH @ gate_EH.mT, config, None)
                expected = by_triton(x_TH, Routing(expert_TK, weight_TK), resident)
                # on a GPU a row of few numbers may be laid out otherwise, and the weights summed up in another order
                assert torch.equal(y_TH, expected) or miss != "move" or DEVICE.type == "cuda"
                torch.testing.assert_close(y_TH, expected, rtol=1e-4, atol=1e-5)
        counters = captured.memory.cache.counters
        assert counters.requested > counters.hits > 0 and bool(counters.computed) <= (miss != "move")


@pytest.mark.parametrize("miss", ["move", "cpu"])
def test_experts_with_changed_routing_take_two_launches(miss: str) -> None:
    """Ids in another order; or where the host may compute experts, weights that were rounded."""
    resident, given, config = weights_of(torch.float32), routed(1, torch.float32), RouterConfig(E, K)

    def changed(routing: Routing) -> Routing:
        expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
        return Routing(expert_TK.flip(1), weight_TK) if miss == "move" else Routing(expert_TK, weight_TK.half().float())

    class Changed(CapturedLayers):
        def _run(self) -> None:
            self.found = []
            with torch.no_grad():
                for layer, gate_EH in zip(self.memory.layers, self.gates, strict=True):
                    routing = changed(self.route(layer, self.x_TH @ gate_EH.mT))
                    self.found.append(experts(self.x_TH, routing, layer))

    gates = [torch.randn(E, H).to(DEVICE) for _ in range(2)]
    with closing(Changed(resident, K, E, given, config=config, gates=gates, miss=miss)) as captured:
        assert captured.memory.replays._two_launches == {0, 1}
        for y_TH, gate_EH in zip(captured(*given), gates, strict=True):
            expected = by_triton(given[0], changed(route(given[0] @ gate_EH.mT, config)), resident)
            torch.testing.assert_close(y_TH, expected, rtol=1e-4, atol=1e-5)
