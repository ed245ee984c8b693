"""Expert weights that stay as the caller stores them; each job of a pass packs the panels it reads, and forgets them.

E experts · O out · I in

    node = NodeExperts(StoredWeights(gate_up_EJH), StoredWeights(down_EHI), None, None, activation)

For weights that change between the passes: nothing of them is kept, and they can be given gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.packed_weights import PackedKind, _Packing


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """(E, O, I) in bf16 on the CPU, at any strides; fast where one of the inner strides is 1."""

    weight_EOI: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        weight = self.weight_EOI
        if weight.dim() != 3 or weight.dtype != torch.bfloat16 or not weight.is_cpu:
            raise bad_value(
                "weight_EOI",
                "(experts, out, in) in bfloat16 on the CPU",
                f"{tuple(weight.shape)} in {weight.dtype} on {weight.device}",
                "cast and move it first",
            )

    @property
    def kind(self) -> PackedKind:
        return "bf16"

    @property
    def experts(self) -> int:
        return self.weight_EOI.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight_EOI.shape[1]

    @property
    def in_features(self) -> int:
        return self.weight_EOI.shape[2]

    @property
    def forward(self) -> _Packing:
        stride_e, stride_out, stride_in = self.weight_EOI.stride()
        return self._read(self.out_features, self.in_features, (stride_e, stride_out, stride_in))

    @property
    def transposed(self) -> _Packing:
        stride_e, stride_out, stride_in = self.weight_EOI.stride()
        return self._read(self.in_features, self.out_features, (stride_e, stride_in, stride_out))

    def _read(self, columns: int, depth: int, stride_ECD: tuple[int, int, int]) -> _Packing:
        return _Packing(self.weight_EOI, columns, depth, None, stride_ECD=stride_ECD)
