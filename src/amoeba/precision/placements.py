"""The placements of quantised experts (fp8-weights, mxfp4-weights, ...), and of the training recipes."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from amoeba.core import cost
from amoeba.core.config import Activation
from amoeba.core.placement import LayerSizes, Placement, Tolerance
from amoeba.core.weights import ExpertWeights
from amoeba.precision.blocks import PACKED_KINDS
from amoeba.precision.formats import E4M3, FP8_128, MXFP4, MXFP8, NVFP4, OF_BLOCKS, Format
from amoeba.precision.quantised_experts import dequantise_experts, quantise_experts
from amoeba.precision.recipes import W8A8, Fp8Experts, with_precision


def _represented(weights: ExpertWeights, format: Format) -> ExpertWeights:
    return dequantise_experts(quantise_experts(weights, format), weights.dtype)


def _represented_for_w8a8(weights: ExpertWeights) -> ExpertWeights:
    """The same numbers, marked: without gradients rows are quantised before they meet them."""
    found = _represented(weights, FP8_128)
    return Fp8Experts(*found.tensors(), found.activation, W8A8)


def _expert_bytes(sizes: LayerSizes, format: Format) -> int:
    activation = sizes.activation or Activation()
    return cost.expert_bytes(
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        gated=activation.gated,
        interleaved=activation.interleaved,
        format=format,
    )


def _bytes_of_number(format: Format) -> float:
    rows, columns = format.block
    if format.scale == "inside":
        return format.stored_columns(columns) / columns
    return format.element.bits / 8 + (4 if format.scale == "fp32" else 1) / (rows * columns)


def _how() -> str:
    return "by our kernels on a GPU, by the C++ core on a CPU"


def _placement(name: str, format: Format) -> Placement:
    make = functools.partial(quantise_experts, format=format)
    # Without gradients the C++ core rounds rows to 8 bits where it multiplies whole numbers, as llama.cpp does: 1/254
    # of the largest of 32, in both products, and offsets of blocks cancel.
    whole = Tolerance(inference=None if format.element == E4M3 else 2e-2)
    return Placement(
        name,
        f"quantised to {format.name} and dequantised as they are read",
        make=make,
        tolerances={torch.float32: whole, torch.bfloat16: whole, torch.float16: Tolerance()},
        how=_how,
        represent=functools.partial(_represented, format=format),
        itemsize=_bytes_of_number(format),
        expert_bytes=functools.partial(_expert_bytes, format=format),
    )


def _w8a8() -> Placement:
    return replace(
        _placement(W8A8, FP8_128),
        summary="quantised to fp8-128, and so are rows where no gradient is taken",
        make=functools.partial(quantise_experts, format=FP8_128, products=W8A8),
        # As of recipes, see below; and in cases whose numbers are few and equal, many at once are next to a middle.
        # Without codes of rows the error is 4 % and more.
        tolerances={dtype: Tolerance(inference=3e-2) for dtype in (torch.float32, torch.bfloat16)},
        how=lambda: "by our kernels on a Hopper GPU, in plain torch elsewhere",
        represent=_represented_for_w8a8,
    )


def _recipe(precision: str) -> Placement:
    """A precision is not a placement: it cannot be selected as one, and its experts are resident. It is listed to be
    verified."""
    make = functools.partial(with_precision, precision=precision)
    # Clamped gates and whole multiples for ups make exact ties of a block's scale in e4m3. In nvfp4 the last bit of an
    # activation then decides over sixteen numbers; each product is proven by itself within the ordinary tolerance.
    loose = precision == "nvfp4"
    return Placement(
        precision,
        f"trained in {precision}",
        make=make,
        # In fp32, too, a number next to the middle between two codes may fall to the other one.
        tolerances={
            torch.float32: Tolerance(4e-2, 1e-2) if loose else Tolerance(3e-3, 3e-3),
            torch.bfloat16: Tolerance(4e-2 if loose else 1e-2, 1e-2),
        },
        represent=make,
        trains=True,
        offered=False,
    )


_FORMATS = (
    _placement("fp8-weights", FP8_128),
    _placement("mxfp8-weights", MXFP8),
    _placement("mxfp4-weights", MXFP4),
    _placement("nvfp4-weights", NVFP4),
)
# Of files: nothing is quantised to them but what is verified.
_BLOCKS = {
    name: replace(
        _placement(f"{name}-weights", format),
        summary=f"in {name}, as the file has them",
        offered=False,
    )
    for name, format in OF_BLOCKS.items()
}
PRECISION_PLACEMENTS = (
    *_FORMATS,
    *(_BLOCKS[name] for name in PACKED_KINDS),
    _w8a8(),
    _recipe("fp8"),
    _recipe("fp8-ste"),
    _recipe("fp8-saved"),
    _recipe("fp8-all"),
    _recipe("mxfp8"),
    _recipe("nvfp4"),
)


def placement_of(format: Format) -> Placement:
    """Under which experts in this format stand, where a file had them in it: blocks of fp8 may have any size there."""
    places = dict(zip(("fp8-128", "mxfp8", "mxfp4", "nvfp4"), _FORMATS, strict=True)) | _BLOCKS
    return places.get(format.name, _FORMATS[0])
