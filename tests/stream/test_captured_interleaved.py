"""On a GPU: CUDA graphs of several groups in turns give the numbers of resident experts at every step.

tests/stream/test_interleaved.py has the same on threads that stand for a GPU, at any speed.
"""

from contextlib import closing
from functools import partial

import pytest
import torch
from test_captured_experts import SameLayers
from test_gpu_streamed_experts import DEVICE, by_triton, routed_wide, wide
from torch import Tensor

from amoeba import Routing, experts
from amoeba.core.graph_replays import Member
from amoeba.stream.gpu.device import CudaDevice
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MOST_IDS

pytestmark = pytest.mark.gpu

COUNT, K, LAYERS, STEPS = 32, 8, 3, 40


class Group:
    """A graph of one pass over each layer, and what each step of it gave."""

    def __init__(self, memory: DeviceMemory, number: int, groups: int) -> None:
        given = [routed_wide(1, COUNT, K, 100 * number + step) for step in range(STEPS)]
        self.given, self.step = given, 0
        self.x_TH, self.expert_TK = given[0][0].clone(), given[0][1].expert_TK.clone()
        self.weight_TK = given[0][1].weight_TK.clone()
        self.found = [[torch.zeros_like(self.x_TH) for _ in range(LAYERS)] for _ in range(STEPS)]
        self.y: list[Tensor] = []
        self._memory, replays, graph, stream = memory, memory.replays, torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), replays.as_group(number, groups):
            with torch.cuda.stream(stream), replays.rehearsing():
                self._run()
            torch.cuda.synchronize()
            capture = partial(torch.cuda.graph, graph, stream=stream, capture_error_mode="thread_local")
            with replays.capturing() as passes, capture():
                self._run()
        self._graph, self._stream = graph, stream
        self.member = Member(passes, self._launch, stream)

    def _run(self) -> None:
        routing = Routing(self.expert_TK, self.weight_TK, trusted=True)
        self.y = [experts(self.x_TH, routing, layer) for layer in self._memory.layers]

    def _launch(self) -> None:
        x_TH, routing = self.given[self.step]
        with torch.cuda.stream(self._stream):
            for target, source in (
                (self.x_TH, x_TH),
                (self.expert_TK, routing.expert_TK),
                (self.weight_TK, routing.weight_TK),
            ):
                target.copy_(source)
            self._graph.replay()
            for target, y_TH in zip(self.found[self.step], self.y, strict=True):
                target.copy_(y_TH)
        self.step += 1


@pytest.mark.parametrize(
    ("slots", "host_slots", "groups"), [(16, COUNT, 2), (20, COUNT, 2), (16, 4, 2), (28, COUNT, 3)]
)
def test_every_step_of_every_group_gives_the_resident_bits(slots: int, host_slots: int, groups: int) -> None:
    resident = wide(COUNT)
    each = [slots] * LAYERS, [host_slots] * LAYERS
    with closing(DeviceMemory(SameLayers(resident, LAYERS), CudaDevice(DEVICE), *each, MOST_IDS)) as memory:
        made = [Group(memory, number, groups) for number in range(groups)]
        for part in (STEPS // 4, STEPS - STEPS // 4):  # one behind the other
            memory.replays.interleave([group.member for group in made], part)
        torch.cuda.synchronize()
        memory.replays.check()
        for group in made:
            for step, (given, found) in enumerate(zip(group.given, group.found, strict=True)):
                expected = by_triton(*given, resident)
                assert all(torch.equal(y_TH, expected) for y_TH in found), step
        counters = memory.cache.counters
        assert counters.requested > counters.hits > 0


def test_nothing_synchronises_the_device_while_groups_take_turns() -> None:
    resident = wide(COUNT)
    each = [16] * LAYERS, [COUNT] * LAYERS
    with closing(DeviceMemory(SameLayers(resident, LAYERS), CudaDevice(DEVICE), *each, MOST_IDS)) as memory:
        made = [Group(memory, number, 2) for number in range(2)]
        memory.replays.interleave([group.member for group in made], 10)
        torch.cuda.set_sync_debug_mode("error")
        try:
            memory.replays.interleave([group.member for group in made], 20)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        memory.replays.check()
