"""Experts that the next layer's router is expected to choose are copied early: numbers stay, whatever was expected.

On a machine without a GPU threads stand for it (simulated_device.py), and Triton's interpreter computes.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from simulated_device import CopyFailed, SimulatedDevice
from test_captured_experts import Captured, SameLayers
from test_gpu_streamed_experts import DEVICE, E, H, K, by_triton, routed, routed_wide, weights_of, wide
from torch import Tensor

from amoeba import Routing, experts
from amoeba.integrations.experts_module import router_matrix
from amoeba.stream.gpu import fast_path, predictions
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MOST_IDS
from selection import quick, without_a_gpu_thorough

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

LAYERS, SLOTS = 2, K + 2  # two of them are spared
ON_GPU = DEVICE.type == "cuda"


def router(seed: int) -> Tensor:
    return torch.randn(E, H, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def routed_by(matrix: Tensor, seed: int) -> tuple[Tensor, Routing]:
    """A token with the experts that the matrix chooses."""
    x_TH = torch.randn(1, matrix.shape[1], generator=torch.Generator().manual_seed(seed)).to(DEVICE, matrix.dtype)
    expert_TK = (x_TH @ matrix.mT).topk(K, dim=1).indices
    return x_TH, Routing(expert_TK, torch.full((1, K), 1 / K, device=DEVICE), trusted=True)


def captured_by(matrix: Tensor, host_slots: int = E) -> Captured:
    return Captured(weights_of(), SLOTS, host_slots, routed(1), LAYERS, routers=[matrix] * LAYERS)


def check_numbers(captured: Captured, matrix: Tensor, seed: int) -> None:
    given = routed_by(matrix, seed)
    expected = by_triton(*given, weights_of())
    for y_TH in captured(*given):
        assert torch.equal(y_TH, expected), seed


def check_slots(captured: Captured) -> None:
    """Every slot of a layer is an expert's, spare, or neither taken yet."""
    memory = captured.memory
    for layer in range(LAYERS):
        table, early = memory.cache.top(layer), memory.replays.serving.fast.early[layer]
        taken = [*table.slot_of.values(), *table.spare, *early.values()]
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(SLOTS))
        assert len(table.spare) + len(early) == 2 and table.slot_of == memory.pool.shown[layer]


@quick(lambda compiled: compiled or ON_GPU)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "Python"])
def test_what_was_expected_is_there_and_the_numbers_are_those_of_resident_experts(compiled, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr(fast_path, "serving_library", lambda: None)
    same = router(0)
    with torch.no_grad(), closing(captured_by(same)) as captured:
        memory = captured.memory
        for seed in range(60 if ON_GPU else 7):
            if seed == 3:  # the tiers are full
                memory.cache.restart_counters()
            check_numbers(captured, same, seed)
            check_slots(captured)
            if ON_GPU and seed % 5 == 4:  # a prompt in between
                many = routed(66)
                assert torch.equal(experts(*many, memory.layers[1]), by_triton(*many, weights_of()))
        counters = memory.cache.counters
        assert counters.prefetched_used <= counters.prefetched
        if not ON_GPU:  # there the host may be too late
            assert 0 < counters.prefetched_used <= counters.misses_of_layer[1]
            assert counters.prefetch_recall == counters.prefetched_used / sum(counters.misses_of_layer)
            assert counters.waited == counters.prefetched_used
        assert counters.host_bytes == (counters.from_host + counters.prefetched) * memory.store.expert_bytes(0)


def test_wrong_guesses_change_nothing_and_are_given_up(monkeypatch, caplog) -> None:
    monkeypatch.setattr(predictions, "JUDGED", 4)
    asked, guessed = router(0), -router(0)
    caplog.set_level("INFO", "amoeba")
    with torch.no_grad(), closing(captured_by(guessed)) as captured:
        for seed in range(60 if ON_GPU else 7):
            check_numbers(captured, asked, seed)
            check_slots(captured)
        begun = captured.memory.cache.counters.prefetched
        if ON_GPU and begun < predictions.JUDGED:
            return  # layers so small that requests came before the guesses
        assert caplog.text.count("it saves no time") == 1
        captured(*routed_by(asked, 99))
        assert captured.memory.cache.counters.prefetched == begun


@without_a_gpu_thorough
def test_what_is_only_on_the_disk_is_not_copied_early() -> None:
    same = router(0)
    with torch.no_grad(), closing(captured_by(same, host_slots=0)) as captured:
        for seed in range(3):
            check_numbers(captured, same, seed)
        assert captured.memory.cache.counters.prefetched == 0
        check_slots(captured)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="a simulated device fails when it is told to")
def test_after_an_early_copy_that_failed_the_next_try_is_right(monkeypatch) -> None:
    same = router(0)
    with torch.no_grad(), closing(captured_by(same)) as captured:
        early, device = captured.memory.replays.serving.fast.early, captured.device
        for seed in range(3):
            captured(*routed_by(same, seed))
        begin = early.begin

        def fails(layer: int, expected: list[int]) -> None:
            device.fails_at = device.copied + 2  # an expert's second part
            begin(layer, expected)

        monkeypatch.setattr(early, "begin", fails)
        with pytest.raises(CopyFailed):
            any(captured(*routed_by(same, seed)) is None for seed in range(3, 9))
        monkeypatch.undo()
        device.fails_at = None
        for seed in range(3, 5):
            check_numbers(captured, same, seed)
            check_slots(captured)


def test_passes_outside_of_graphs_load_early_too() -> None:
    same = router(0)
    store = SameLayers(weights_of(), LAYERS)
    device = CudaDevice(DEVICE) if ON_GPU else SimulatedDevice(inline=True)
    with torch.no_grad(), closing(DeviceMemory(store, device, [4] * LAYERS, [2] * LAYERS, MOST_IDS)) as memory:
        memory.replays.predict_by([same] * LAYERS)
        for seed in range(40 if ON_GPU else 6):
            given = routed_by(same, seed)
            expected = by_triton(*given, weights_of())
            for layer in memory.layers:
                assert torch.equal(experts(*given, layer), expected), seed
        counters = memory.cache.counters
        assert counters.prefetched_used <= counters.prefetched
        if not ON_GPU:  # of four slots three are used by the pass before: there is room for one
            assert counters.prefetched_used == counters.prefetched > 0
            assert counters.prefetch_recall < 1


def test_without_routers_nothing_is_begun_or_judged(monkeypatch, caplog) -> None:
    monkeypatch.setattr(predictions, "JUDGED", 0)
    caplog.set_level("INFO", "amoeba")
    with torch.no_grad(), closing(Captured(weights_of(), K, E, routed(1), 1)) as captured:
        for seed in range(2):
            captured(*routed_by(router(0), seed))
        assert captured.memory.cache.counters.prefetched == 0
    assert "saves no time" not in caplog.text
    assert [fast_path.spares_of(*sizes) for sizes in ((4, 128), (32, 128), (32, 32))] == [0, 2, 0]


def test_the_router_beside_experts_is_found_by_its_shape() -> None:
    block = torch.nn.Module()
    assert router_matrix(block, E, H) is None
    block.gate = torch.nn.Linear(H, E)
    assert torch.equal(router_matrix(block, E, H), block.gate.weight)
    assert router_matrix(block, E + 1, H) is None and router_matrix(None, E, H) is None


@pytest.mark.gpu
def test_many_replays_with_guesses_of_any_quality_give_the_resident_bits() -> None:
    resident, generator = wide(32), torch.Generator().manual_seed(5)
    hidden = resident.hidden
    matrices = [torch.randn(32, hidden, generator=generator).to(DEVICE, resident.dtype) for _ in range(3)]
    first = routed_wide(1, 32, 8, 0)
    with torch.no_grad(), closing(Captured(resident, 12, 32, first, 3, routers=matrices)) as captured:
        for seed in range(80):
            given = routed_wide(1, 32, 8, seed)
            expected = by_triton(*given, resident)
            for y_TH in captured(*given):
                assert torch.equal(y_TH, expected), seed
