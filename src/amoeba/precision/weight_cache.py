"""Quantised copies of weights that train, in both orientations: made once, rewritten in place, never stale.

E experts · O out · I in

    cached = quantised_weight(gate_up_EJH, FP8_TRAINING)
    cached.matrix, cached.transposed()          # of (E, J, H) and of (E, H, J), both as a product reads them along rows

Codes are kept for as long as the weight is, and stay where they are in memory. That a weight changed shows in its
version counter and its address; what is written through `weight.data` or by a fused optimizer may move neither. So its
bits are summed up, too, which takes a read of the weight, and on a GPU a wait for it.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amoeba.precision.formats import Format
from amoeba.precision.quantised import QuantisedMatrix, quantise, quantise_again

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class QuantisedWeight:
    """matrix: of a weight (E, O, I), as it was when `update` was called last."""

    def __init__(self, weight_EOI: Tensor, format: Format) -> None:
        self._seen = _state(weight_EOI)
        self.matrix = quantise(weight_EOI, format)
        self._transposed: QuantisedMatrix | None = None

    def update(self, weight_EOI: Tensor) -> None:
        state = _state(weight_EOI)
        if state != self._seen:
            quantise_again(weight_EOI, self.matrix)
            self._seen = state
            if self._transposed is not None:
                self._transpose(self._transposed)

    def transposed(self) -> QuantisedMatrix:
        """The same codes and scales with rows for columns: (E, I, O). Made when it is first asked for."""
        with _lock, torch.inference_mode(False):
            if self._transposed is None:
                self._transposed = self.matrix.transposed()  # where there is a scale of each matrix, it is the same
            return self._transposed

    def _transpose(self, into: QuantisedMatrix) -> None:
        found = self.matrix.transposed()
        into.data.copy_(found.data)
        into.scales.copy_(found.scales)


def quantised_weight(weight_EOI: Tensor, format: Format) -> QuantisedWeight:
    """Of the numbers that the weight has now. format: with square blocks."""
    # A module that stores (E, in, out) makes a view for each call; what it is a view of stays.
    owner = weight_EOI if weight_EOI._base is None else weight_EOI._base
    place = weight_EOI.storage_offset(), weight_EOI.shape, weight_EOI.stride()
    form = (*place, weight_EOI.dtype, weight_EOI.device, format)
    with _lock, torch.inference_mode(False):  # codes that an evaluation made are rewritten in training
        kept: dict[tuple, QuantisedWeight] = _kept.setdefault(owner, {})
        if form in kept:
            kept[form].update(weight_EOI)
        else:
            kept[form] = QuantisedWeight(weight_EOI, format)
        return kept[form]


_kept = WeakTensorKeyDictionary()
_lock = threading.RLock()


def _state(weight_EOI: Tensor) -> tuple:
    version = 0 if weight_EOI.is_inference() else weight_EOI._version
    return version, weight_EOI.data_ptr(), _sums(weight_EOI.detach()).tolist()


def _sums(weight_EOI: Tensor) -> Tensor:
    """One number for each expert: the sum of its bits, each times a number of its row and one of its column, so that
    exchanging two numbers shows, too. It wraps around."""
    experts, rows, columns = weight_EOI.shape
    bits_EOI = weight_EOI.view(_INTEGERS[weight_EOI.dtype.itemsize])
    row_O, column_I = (_odd_numbers(length, weight_EOI.device) for length in (rows, columns))
    sums = [((bits.to(torch.int64) * column_I).sum(1) * row_O).sum() for bits in bits_EOI.unbind(0)]
    return torch.stack(sums) if sums else bits_EOI.new_zeros(experts, dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def _odd_numbers(length: int, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(length)
    drawn = torch.randint(-(2**62), 2**62, (length,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn * 2 + 1).to(device)
