"""A step by Triton's kernels, for parameters on a GPU: one launch for all parameters of a kind, without waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.kernels import adamw
from amoeba.kernels.adamw import TensorTable, sum_of_squares
from amoeba.optim.torch_step import Batch


class KernelSteps:
    def __init__(self) -> None:
        self._tables: dict[Hashable, TensorTable] = {}

    def update(self, batch: Batch, scale: Tensor | None) -> None:
        """scale: of the gradients, one fp32 number on the same device."""
        kind = batch.kind
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            expected = (
                "not to be captured in a CUDA graph: the number of the step and the learning rate are on the host"
            )
            remedy = "capture forward and backward, step outside"
            raise bad_value("step of the optimizer", expected, "a capture", remedy)
        counts = [parameter.numel() for parameter in batch.parameters]
        columns = (batch.parameters, batch.remainders, batch.exp_avgs, batch.exp_avg_sqs, batch.gradients)
        addresses = [[tensor.data_ptr() for tensor in column] or [0] * len(counts) for column in columns]
        rows = [list(row) for row in zip(*addresses, counts, batch.positions, strict=True)]
        with _on(kind.device):
            adamw.update(
                *self._table((batch.group, kind)).place(rows, counts, kind.device),
                scale,
                batch.coefficients,
                split=kind.parameter_dtype == torch.bfloat16,
                gradient_bf16=kind.gradient_dtype == torch.bfloat16,
                states_bf16=kind.states_dtype == torch.bfloat16,
            )
        # torch does not see what kernels write, and who keeps something computed from a parameter asks for its version
        torch.autograd.graph.increment_version(batch.parameters)

    def sum_of_squares(self, gradients: list[Tensor]) -> Tensor:
        """Of gradients that are dense in memory, of one dtype and on one device."""
        device, dtype = gradients[0].device, gradients[0].dtype
        counts = [gradient.numel() for gradient in gradients]
        rows = [[gradient.data_ptr(), count] for gradient, count in zip(gradients, counts, strict=True)]
        with _on(device):
            return sum_of_squares(
                *self._table((device, dtype)).place(rows, counts, device), bf16=dtype == torch.bfloat16
            )

    def _table(self, key: Hashable) -> TensorTable:
        return self._tables.setdefault(key, TensorTable())


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
