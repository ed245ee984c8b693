"""Experts that a captured step misses and the CPU computes: right numbers, right tables, and no hang.

E experts · K experts per token

Without a GPU threads stand for it (simulated_device.py); the CPU computes in earnest.
"""

import logging
import threading
from collections.abc import Iterable
from contextlib import closing
from itertools import product

import pytest
import torch
from test_captured_experts import Captured
from test_gpu_streamed_experts import DEVICE, DTYPES, H, I, K, by_triton, factors, routed, routed_wide, wide
from test_gpu_streamed_experts import weights_of as few_weights
from torch import Tensor

from amoeba import ExpertWeights, Routing, experts
from amoeba.bench.workload import relative_error
from amoeba.core.config import Activation
from amoeba.proof.conformance import TOLERANCE
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.fast_path import SERVED, serving_library
from amoeba.stream.gpu.host_compute import MOST_TOKENS
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MOST_IDS, MemoryStore
from selection import each_value_once, quick

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.skipif(serving_library() is None, reason="no compiler"),
]
E, SLOTS = 12, 2 * K


def weights_of(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    shapes = (E, 2 * I, H), (E, H, I)
    return ExpertWeights(*[(torch.randn(s, generator=generator) * 0.2).to(DEVICE, dtype) for s in shapes])


def in_turn(number: int, tokens: int, dtype: torch.dtype, experts: int = E) -> tuple[Tensor, Routing]:
    """Passes that each ask for others; of two tokens one of each is the same."""
    x_TH, routing = routed(tokens, dtype)
    first = torch.arange(tokens).view(-1, 1) * (K - 1) + 2 * number
    expert_TK = (torch.arange(K) + first) % experts
    return x_TH * (1 + number), Routing(expert_TK.to(DEVICE), routing.weight_TK, trusted=True)


class Computed(Captured):
    """With every expert in host memory, and counters from 0."""

    def __init__(self, miss: str, tokens: int = 1, dtype: torch.dtype = torch.float32, **options) -> None:
        self.resident, self.tokens, self.dtype = weights_of(dtype), tokens, dtype
        super().__init__(self.resident, SLOTS, E, routed(tokens, dtype), miss=miss, **options)
        for layer in range(len(self.memory.layers)):
            with self.memory.pool.turn(layer), closing(self.memory.loads.acquire(layer, range(E))) as groups:
                for _ in groups:
                    pass
        self.step(0)  # takes the long way, since nothing was prepared
        self.memory.cache.restart_counters()

    def takes(self, *, link: float) -> None:
        """Seconds of a byte."""
        computing = self.memory.computing
        assert computing is not None
        computing._compute.move_seconds = link

    def step(self, number: int) -> None:
        given = in_turn(number, self.tokens, self.dtype)
        expected = by_triton(*given, self.resident)
        for y_TH in self(*given):
            assert relative_error(y_TH, expected) <= TOLERANCE[self.dtype]

    def steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(number)

    def same_bits(self, number: int) -> bool:
        given = in_turn(number, self.tokens, self.dtype)
        expected = by_triton(*given, self.resident)
        return all(torch.equal(y_TH, expected) for y_TH in self(*given))

    @property
    def counters(self):
        return self.memory.cache.counters

    def shown_as_it_is(self) -> None:
        self._wait()
        self.device.record(self.device.copies).wait()
        for layer, kind in enumerate(self.memory.layers):
            found = {e: slot for e, slot in enumerate(self.memory.pool.map.slot_E(layer).tolist()) if slot >= 0}
            assert found == self.memory.pool.shown[layer] == dict(self.memory.cache.top(layer).slot_of)
            for expert, slot in found.items():
                assert torch.equal(kind.slots.gate_up_EJH[slot], self.resident.gate_up_EJH[expert])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@quick(lambda tokens: tokens == 2)
@pytest.mark.parametrize("tokens", [1, 2])
def test_on_the_cpu_nothing_is_moved_and_the_numbers_are_right(tokens: int, dtype: torch.dtype) -> None:
    with torch.no_grad(), closing(Computed("cpu", tokens, dtype)) as computed:
        before = dict(computed.memory.pool.shown[0])
        for number in range(1, 5):
            computed.step(number)
        counters = computed.counters
        assert (counters.from_host, counters.host_bytes) == (0, 0) and counters.computed > 0
        assert counters.requested == counters.hits + counters.computed == 2 * 4 * (K if tokens == 1 else 2 * K - 1)
        assert sum(counters.misses_of_layer) == counters.computed
        assert computed.memory.pool.shown[0] == before
        assert computed.memory.computing.seconds > 0
        computed.shown_as_it_is()


def test_over_a_slow_link_misses_are_computed_and_promoted() -> None:
    with torch.no_grad(), closing(Computed("auto")) as computed:
        computed.takes(link=1.0)
        for number in range(1, 5):
            computed.step(number)
        counters = computed.counters
        assert counters.computed > 0, "more are missing than are promoted at once"
        assert counters.from_host > 0
        assert counters.requested == counters.hits + counters.computed + counters.from_host
        computed.shown_as_it_is()
        wanted = set(in_turn(3, 1, torch.float32)[1].expert_TK.flatten().tolist())
        for _ in range(9 * K):  # each promotes one, if the link has little to do
            if all(wanted.issubset(shown) for shown in computed.memory.pool.shown):
                break
            computed.step(3)
        hits = computed.counters.hits
        assert computed.same_bits(3), "all were in slots"
        assert computed.counters.hits == hits + 2 * K
        computed.shown_as_it_is()


@pytest.mark.thorough
def test_where_the_link_is_quick_misses_are_moved() -> None:
    with torch.no_grad(), closing(Computed("auto")) as computed:
        computed.takes(link=1.0)
        for number in range(1, 4):
            computed.step(number)  # and the CPU is known
        computed.takes(link=1e-30)
        computed.memory.cache.restart_counters()
        for number in range(4, 7):
            assert computed.same_bits(number)
        counters = computed.counters
        assert counters.computed == 0 and counters.from_host == counters.requested - counters.hits > 0
        computed.shown_as_it_is()


@quick(lambda where: where == "outside")
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_next_pass_waits_for_what_was_promoted(where: str) -> None:
    """Of graphs. In between its copy is held back."""
    with torch.no_grad(), closing(Computed("auto")) as computed:
        computed.takes(link=1.0)
        shown = computed.memory.pool.shown
        there = sorted(set(shown[0]) & set(shown[1]))[: K - 1]
        ids = [*there, next(expert for expert in range(E) if expert not in shown[0] and expert not in shown[1])]
        x_TH, routing = routed(1)
        given = x_TH, Routing(torch.tensor([ids], device=DEVICE), routing.weight_TK, trusted=True)
        expected, copies = by_triton(*given, computed.resident), threading.Event()
        if DEVICE.type == "cpu":
            computed.device._enqueue(computed.device.copies, lambda: copies.wait(5))
        computed(*given)
        assert computed.counters.computed == 0 < computed.counters.from_host == 2, "promoted in both layers"
        threading.Timer(0.2, copies.set).start()
        if where == "inside":
            found = computed(*given)
        else:
            found = [experts(*given, kind) for kind in computed.memory.layers]
        assert all(torch.equal(y_TH, expected) for y_TH in found)
        assert computed.counters.hits == 2 * (2 * K - 1)


def test_beside_an_adapter_and_for_many_tokens_misses_are_moved() -> None:
    lora, resident = factors(torch.float32), few_weights()
    with torch.no_grad(), closing(Captured(resident, K + 1, 6, routed(1), 1, lora, miss="cpu")) as captured:
        for number in range(4):
            given = in_turn(number, 1, torch.float32, 6)
            (y_TH,) = captured(*given)
            assert torch.equal(y_TH, by_triton(*given, resident, lora=lora))
        assert captured.memory.cache.counters.computed == 0
        assert captured.memory.replays.computes(0, _given(MOST_TOKENS))
        assert not captured.memory.replays.computes(0, _given(MOST_TOKENS + 1))


def _given(tokens: int) -> tuple[Tensor, Tensor]:
    x_TH, routing = routed(tokens)
    return x_TH, routing.weight_TK


def test_after_a_failed_copy_the_next_try_is_right() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("copies of a GPU do not fail")
    with torch.no_grad(), closing(Computed("auto")) as computed:
        computed.takes(link=1.0)
        computed.device.fails_at = computed.device.copied + 1
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            computed.steps(range(1, 4))
        for number in (3, 1, 5):
            computed.step(number)
        computed.shown_as_it_is()


def test_a_sum_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with torch.no_grad(), closing(Computed("cpu")) as computed:
        word = computed.memory.computing._compute.word
        elsewhere = torch.zeros(1, dtype=torch.int32)
        computed.memory.replays.mailbox.limit = 0.05 if DEVICE.type == "cuda" else 1e-4
        if DEVICE.type == "cuda":
            computed._replay = computed._graph()  # with that limit
            computed.step(0)
        computed.memory.computing._compute.word = elsewhere.data_ptr()
        given = in_turn(3, 1, torch.float32)
        with pytest.raises(RuntimeError, match="continued without them"):
            computed(*given)
        computed.memory.computing._compute.word = word
        computed.memory.replays.mailbox.limit = 10.0
        if DEVICE.type == "cuda":
            computed._replay = computed._graph()
        for number in (3, 1, 5):
            computed.step(number)


def test_the_split_ends_as_early_as_can_be() -> None:
    def taken(moved: int, missing: int, ahead: int, move: float, compute: float) -> float:
        return max((ahead + moved) * move if moved else 0.0, (missing - moved) * compute)

    rates = (2.0, 0.7), (2.0, 1.0), (1.0, 1.0), (0.1, 5.0), (2.0, 0.0)
    for missing, ahead, (move, compute) in product(range(1, 9), range(3), rates):
        of_all = [taken(moved, missing, ahead, move, compute) for moved in range(missing + 1)]
        assert of_all[serving_library().amoeba_moved_of(missing, ahead, move, compute)] == min(of_all)


@pytest.mark.parametrize("why", ["float16", "biases", "host memory"])
def test_what_the_cpu_cannot_compute_is_moved_and_said(why: str, caplog) -> None:
    resident = few_weights(torch.float16 if why == "float16" else torch.float32, bias=why == "biases")
    device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else simulated()
    host_slots = 0 if why == "host memory" else 6
    with caplog.at_level(logging.WARNING, "amoeba"):
        memory = DeviceMemory(MemoryStore(resident), device, [4], [host_slots], MOST_IDS, miss="cpu")
    with closing(memory):
        assert memory.computing is None and why in caplog.text and "are copied" in caplog.text


def simulated():
    from simulated_device import LiveDevice

    return LiveDevice(inline=True)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", [Activation(), Activation("gelu", gated=False)], ids=["silu", "gelu, not gated"])
def test_what_the_host_is_handed_it_computes_with_any_weights(dtype: torch.dtype, activation: Activation) -> None:
    """Without kernels: Triton's interpreter has wrong bf16 products. One row more than weights pass by for at once."""
    tokens, width = 5, activation.width(I)
    generator = torch.Generator().manual_seed(1)
    gate_up_EJH, down_EHI = (
        (torch.randn(shape, generator=generator) * 0.2).to(DEVICE, dtype) for shape in ((E, width, H), (E, H, I))
    )
    resident = ExpertWeights(gate_up_EJH, down_EHI, activation=activation)
    device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else simulated()
    with closing(DeviceMemory(MemoryStore(resident), device, [SLOTS], [E], MOST_IDS, miss="cpu")) as memory:
        with memory.pool.turn(0), closing(memory.loads.acquire(0, range(E))) as groups:
            for _ in groups:
                pass
        there = sorted(memory.pool.shown[0])
        missing = [expert for expert in range(E) if expert not in there][:2]
        expert_TK = torch.tensor([[missing[0], there[0]]] * tokens)
        expert_TK[1] = torch.tensor([missing[1], -1])
        x_TH, weight_TK = torch.randn(tokens, H, generator=generator), torch.rand(tokens, 2, generator=generator)
        computing, mailbox = memory.computing, memory.replays.mailbox
        buffer = computing.buffer
        for target, given in ((buffer.x, x_TH), (buffer.expert, expert_TK), (buffer.weight, weight_TK)):
            target[: given.numel()] = given.flatten()
        computing.expect(expert_TK.shape)
        fast, serial = memory.replays.serving.fast, mailbox.expect(1)
        fast.prepare(0)
        at = serial % mailbox.ring * mailbox._row
        for word, value in enumerate([2, 3, serial, *missing, there[0]]):
            mailbox._requests[at + word] = value
        assert fast.look(0, serial, 1) == SERVED
        assert sorted(fast.write_down(0, serial, missing, there[:1])) == missing
        computing.wait()
        assert buffer.word.item() == serial
        mine = torch.where(torch.isin(expert_TK, torch.tensor(missing)), expert_TK, -1)
        wide = ExpertWeights(gate_up_EJH.double().cpu(), down_EHI.double().cpu(), activation=activation)
        expected = experts(x_TH.double(), Routing(mine, weight_TK.double(), trusted=True), wide, backend="eager")
        found = buffer.y[: tokens * H].view(tokens, H).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("miss", ["cpu", "auto"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_many_replays_are_within_tolerance(tokens: int, miss: str) -> None:
    resident, given = wide(64), [routed_wide(tokens, 64, 8, seed) for seed in range(40)]
    with torch.no_grad(), closing(Captured(resident, 24, 64, given[0], 3, miss=miss)) as captured:
        for seed, each in enumerate(given):
            expected = by_triton(*each, resident)
            assert all(relative_error(y_TH, expected) <= TOLERANCE[torch.bfloat16] for y_TH in captured(*each)), seed
            if seed % 10 == 9:  # a prompt in between
                many = routed_wide(200, 64, 8, seed)
                assert torch.equal(experts(*many, captured.memory.layers[1]), by_triton(*many, resident))
        assert captured.memory.cache.counters.computed > 0
        captured.replay_without_waiting(given)
