"""A store, a simulated device and a graph with one pass over each layer, as the tests of replays use them."""

import random

import pytest
import torch
from simulated_device import LiveDevice, LiveGraph
from test_device_memory import E, Layers
from torch import Tensor

from amoeba.stream.gpu.memory import DeviceMemory

IDS = 16


class Served:
    """A graph of one pass over each layer; each replay is told its ids."""

    def __init__(
        self,
        seed: int,
        slots: int | list[int],
        host_slots: int,
        layers: int = 2,
        top_k: int = 2,
        tokens: int = 1,
        device: type[LiveDevice] = LiveDevice,
        store=None,
        **options,
    ) -> None:
        self.device, self.store = device(seed, **options), Layers(layers, seed) if store is None else store
        each = [slots] * layers if isinstance(slots, int) else slots
        self.memory = DeviceMemory(self.store, self.device, each, [host_slots] * layers, IDS)
        self.memory.replays.mailbox.limit = 20.0
        self.wrong: list[str] = []
        self.graph = LiveGraph(self.device)
        self.expert_TK = [torch.zeros(tokens, top_k, dtype=torch.int64) for _ in range(layers)]
        self.seen: list[list[int]] = []

    def capture(self, layers: list[int] | None = None) -> None:
        replays = self.memory.replays
        with replays.rehearsing():
            for layer, ids in enumerate(self.expert_TK):
                replays.rehearse(layer, ids)
        with replays.capturing() as self.passes, self.graph:
            for layer in layers or range(len(self.expert_TK)):
                self._look(layer, replays.slots_of(layer, self.expert_TK[layer]))

    def _look(self, layer: int, slot_TK: Tensor) -> None:
        slots = self.memory.layers[layer].slots

        def look() -> None:
            asked, found = self.expert_TK[layer].flatten().tolist(), slot_TK.flatten().tolist()
            self.seen.append(found)
            for expert, slot in zip(asked, found, strict=True):
                if not 0 <= expert < E:
                    continue
                if slot < 0:
                    self.wrong.append(f"layer {layer}: expert {expert} has no slot")
                    continue
                up, down = slots.gate_up_EJH[slot], slots.down_EHI[slot]
                if not (bool((up == expert + 1 + 100 * layer).all()) and bool((down == expert + 1).all())):
                    self.wrong.append(f"slot {slot} of layer {layer} is not expert {expert}")

        self.device.launch(look)

    def replay(self, ids: list[list[int]]) -> None:
        def launch() -> None:
            for target, row in zip(self.expert_TK, ids, strict=True):
                given = torch.tensor(row).view(target.shape)
                self.device.launch(lambda target=target, given=given: target.copy_(given))
            self.graph.replay()

        self.memory.replays.replay(self.passes, launch)

    def replay_with_a_copy_that_fails(self, fails_at: int) -> None:
        """The fails_at-th of them, in a graph of three layers."""
        self.device.fails_at = self.device.copied + fails_at
        with pytest.raises(RuntimeError, match=r"a copy failed|CUDA error 700"):
            self.replay([[5, 4]] * 3)

    def ended(self) -> None:
        """The host waits for all passes, as for their tokens."""
        self.device.record(self.device.compute).wait()
        self.memory.replays.check()

    def shown_as_it_is(self) -> None:
        """The map on the device is what the host believes it is, and the slots hold it."""
        self.device.record(self.device.compute).wait()
        for layer in range(len(self.expert_TK)):
            found = {e: slot for e, slot in enumerate(self.memory.pool.map.slot_E(layer).tolist()) if slot >= 0}
            assert found == self.memory.pool.shown[layer]
            self.memory.device.record(self.device.copies).wait()
            for expert, slot in found.items():
                assert bool((self.memory.layers[layer].slots.gate_up_EJH[slot] == expert + 1 + 100 * layer).all())

    def close(self) -> None:
        self.memory.close()
        assert not self.wrong, self.wrong[0]


def drawn_ids(drawn: random.Random, layers: int, count: int) -> list[list[int]]:
    return [drawn.sample(range(E), count) for _ in range(layers)]
