"""Rotary embeddings of a Hugging Face model in exact mode on a GPU: queries and keys in one launch each way.

    with fused_rotations(model):        # while `ExactOperators` looks on; elsewhere the function is what it was
        model(...)

A family's `apply_rotary_pos_emb` is recognised by evaluating it, and stands behind ours meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.operators import reverse_only
from amoeba.ops.exact import OUTSIDE, looks_on

_NAME = "apply_rotary_pos_emb"


@contextmanager
def fused_rotations(model: nn.Module) -> Iterator[None]:
    files = {type(module).__module__ for module in model.modules()}
    changed = []
    for file in (sys.modules.get(name) for name in files):
        own = getattr(file, _NAME, None)
        rotations = own if isinstance(own, _Rotations) else _Rotations(own) if _is_usual(own) else None
        if rotations is not None:
            rotations.models += 1
            changed.append((file, rotations))
            setattr(file, _NAME, rotations)
    try:
        yield
    finally:
        for file, rotations in changed:
            rotations.models -= 1
            if rotations.models == 0:
                setattr(file, _NAME, rotations.own)


def _is_usual(function: Any) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)
    q, k, cos, sin = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    try:
        found = function(q, k, cos, sin)
    except Exception:  # it wants other arguments
        return False
    return isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, (rotated(q), rotated(k))))


class _Rotations:
    def __init__(self, own: Any) -> None:
        self.own, self.models = own, 0

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **others: Any) -> Any:
        from amoeba.kernels import rotate

        if more or others or not looks_on() or rotate.why_not(q, k, cos, sin) is not None:
            return self.own(q, k, cos, sin, *more, **others)
        with OUTSIDE:
            return _Rotate.apply(q, k, cos, sin)


class _Rotate(reverse_only("exact mode's rotary embedding")):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q_BQTD: Tensor, k_BGTD: Tensor, cos_RTD: Tensor, sin_RTD: Tensor) -> tuple[Tensor, Tensor]:
        from amoeba.kernels.rotate import rotate

        ctx.save_for_backward(cos_RTD, sin_RTD)
        return rotate(q_BQTD, k_BGTD, cos_RTD, sin_RTD)

    @staticmethod
    def backward(ctx: Any, dq_BQTD: Tensor, dk_BGTD: Tensor) -> tuple[Tensor | None, ...]:
        from amoeba.kernels.rotate import rotate

        return *rotate(dq_BQTD, dk_BGTD, *ctx.saved_tensors, backward=True), None, None
