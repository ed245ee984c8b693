"""Quantised copies of experts that train, on a GPU: kept with the weight, and written again by every forward pass.

E experts · O out · I in

    codes = codes_of(gate_up_EJH, FP8_TRAINING)
    codes.write(gate_up_EJH, both=True)        # in forward: as the weight is now, in both orientations from one read
    codes.matrix, codes.transposed(gate_up_EJH)    # (E, J, H), and (E, H, J) for backward

Nothing tells that a weight was changed: fused optimizers and writes through `.data` move no version counter, and a
replayed CUDA graph asks no one. So forward does not ask, and the GPU is not waited for. A training step writes the
codes once, as it would anyway; where several passes belong to one step, `amoeba.precision.UnchangedWeights` spares the
others that. They stay where they are in memory.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amoeba.cpu.pointers import place_of
from amoeba.kernels.quantise_blocks import quantise_weights
from amoeba.precision.formats import FP8_TRAINING, Format
from amoeba.precision.quantised import QuantisedMatrix, empty_quantised
from amoeba.precision.unchanged_weights import UnchangedWeights, promise


class WeightCodes:
    """matrix: of a weight (E, O, I), as it was when it was written last."""

    def __init__(self, weight_EOI: Tensor, format: Format) -> None:
        self.matrix = empty_quantised(tuple(weight_EOI.shape), format, device=weight_EOI.device)
        self._transposed: QuantisedMatrix | None = None
        self._transposed_of: tuple | None = None  # the state of the weight that it is of; None: of an earlier pass
        self._written_under: tuple[UnchangedWeights, tuple] | None = None

    def write(self, weight_EOI: Tensor, *, both: bool) -> None:
        """both: the other orientation, too, for a backward pass to come."""
        if self.prepare(weight_EOI, both=both):
            quantise_weights(weight_EOI, self.matrix, self._transposed if both else None)
            self.wrote(weight_EOI, both=both)

    def prepare(self, weight_EOI: Tensor, *, both: bool) -> bool:
        """Whether `write` would write now; there is room for it then."""
        promised, state = promise(), _state(weight_EOI)
        has_all = self._transposed_of == state or not both
        if promised is not None and self._written_under == (promised, state) and has_all and not _captures():
            return False
        if both and self._transposed is None:
            found = empty_quantised(tuple(weight_EOI.mT.shape), self.matrix.format, device=weight_EOI.device)
            self._transposed = replace(found, matrix_scale=self.matrix.matrix_scale)  # the same of both
        return True

    def wrote(self, weight_EOI: Tensor, *, both: bool) -> None:
        """For who has launched the same kernel: it is as if `write` had."""
        state = _state(weight_EOI)
        self._transposed_of = state if both else None
        if (promised := promise()) is not None:  # later writes without one change nothing of what this one says
            self._written_under = promised, state

    def has_transposed(self, weight_EOI: Tensor) -> bool:
        return self._transposed is not None and self._transposed_of == _state(weight_EOI)

    def transposed(self, weight_EOI: Tensor) -> QuantisedMatrix:
        """The same with rows for columns: (E, I, O), as the last forward pass wrote it."""
        if not self.has_transposed(weight_EOI):
            self.write(weight_EOI, both=True)
        assert self._transposed is not None
        return self._transposed

    def tensors(self) -> tuple[Tensor, ...]:
        """All that there is room in."""
        made = (self.matrix,) if self._transposed is None else (self.matrix, self._transposed)
        shared = () if self.matrix.matrix_scale is None else (self.matrix.matrix_scale,)
        return (*shared, *(tensor for matrix in made for tensor in (matrix.data, matrix.scales)))


def codes_of(weight_EOI: Tensor, format: Format = FP8_TRAINING) -> WeightCodes:
    """format: with square blocks."""
    # A module that stores (E, in, out) makes a view for each call; what it is a view of stays.
    owner = weight_EOI if weight_EOI._base is None else weight_EOI._base
    place = weight_EOI.storage_offset(), weight_EOI.shape, weight_EOI.stride()
    form = (*place, weight_EOI.dtype, weight_EOI.device, format)
    with _lock:
        kept: dict[tuple, WeightCodes] = _kept.setdefault(owner, {})
        if form not in kept:
            kept[form] = WeightCodes(weight_EOI, format)
        return kept[form]


def _captures() -> bool:
    """Whether this goes into a CUDA graph, which is replayed when no promise holds any more."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _state(weight_EOI: Tensor) -> tuple:
    return 0 if weight_EOI.is_inference() else weight_EOI._version, place_of(weight_EOI)


_kept = WeakTensorKeyDictionary()
_lock = threading.Lock()
