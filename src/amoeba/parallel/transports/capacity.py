"""Capacity estimates: how many rows to allocate for a pass, before or after its rows are counted.

    room = rounded_up(owned, slots)                 # `owned` of `slots` slots have an expert here
    guess = estimate.guess(layer, slots)            # None: of this layer nothing is known yet
    estimate.remember(layer, room, slots, guess)

A guess is the room of the layer's last pass, in proportion to the slots, and one size more. After a pass that needed
more than those behind it, it comes down by one size at a time. What becomes of a pass that has more rows than were
guessed is said where guesses are made, in `PeerExchange.room`.
"""

from __future__ import annotations

from amoeba.core.weights import AnyExperts

_SIZES = 64  # few, so that memory of the pass before serves again
_TILE = 128  # rows
_MOST_LAYERS = 4096


def rounded_up(owned: int, slots: int) -> int:
    """To one of the sizes."""
    size = _size(slots)
    return min(-(-max(owned, 1) // size) * size, slots)


def _size(slots: int) -> int:
    return max(-(-slots // (_SIZES * _TILE)), 1) * _TILE


class CapacityEstimate:
    """What layers needed. A layer is known by the place of its weights: should another one lie there some day, its
    first guess is no good, and no harm is done."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[int, int]] = {}  # of a layer: rows, and of how many slots

    def guess(self, layer: int, slots: int) -> int | None:
        rows, before = self._next.get(layer, (0, 0))
        if rows == 0 or slots == 0:
            return None
        return rounded_up(-(-rows * slots // before), slots)

    def remember(self, layer: int, room: int, slots: int, guess: int | None) -> None:
        if slots == 0:
            return
        if len(self._next) >= _MOST_LAYERS:
            self._next.clear()
        size = _size(slots)
        self._next[layer] = min(max(room + size, (guess or 0) - size), slots), slots


def layer_of(local: AnyExperts) -> int:
    return next((tensor.data_ptr() for tensor in local.tensors() if tensor is not None), 0)
