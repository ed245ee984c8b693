"""`triton` for experts that train in 8 or 4 bits: our kernels for Hopper, and plain Triton for other GPUs with fp8 and
for mxfp8 and nvfp4; forward and backward without a host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amoeba.backends import fp8, fp8_saved, sorted_rows, triton
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import graph_is_freed
from amoeba.cpu.pointers import place_of
from amoeba.precision.formats import Format
from amoeba.precision.recipes import AUTO, W8A8, Fp8Experts

if TYPE_CHECKING:
    from amoeba.backends.fp8_kernel_rows import StraightThroughKernelRows
    from amoeba.backends.fp8_weights import WeightCodes  # these import Triton

# What H and I have to be multiples of: half of the numbers that share a scale.
WIDTH = 64
# What plain Triton has kernels for (fp8-all and w8a8 need those of Hopper), and on which GPUs.
PLAIN_TRITON = ("fp8", "fp8-ste", "fp8-saved", "mxfp8", "nvfp4")
FIRST_WITH_FP8 = (8, 9)


class Fp8TritonBackend(PassesBackend):
    """Importing this file does not import Triton: the first pass does."""

    name, summary, kinds = "triton", "products of quantised operands by our kernels", (Fp8Experts,)
    operator_name = "fp8_triton"
    traced = SavedRows(map_dtype=torch.int32, h=fp8_saved.fake_h)
    overlaps = True  # sums leave early; rows are waited for

    def preference(self, device: torch.device) -> int:
        return triton.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        reason = fp8.BACKEND.why_not(request)
        if reason is not None:
            return reason
        assert isinstance(weights, Fp8Experts)
        return why_not_on(weights.device, weights, weights.recipe)

    def row_format(self, request: Request) -> Format | None:
        return fp8.BACKEND.row_format(request)

    def rows(self, weights: Fp8Experts) -> type[StraightThroughKernelRows]:
        """By which `amoeba.proof.conformance` proves one product after the other."""
        from amoeba.backends.fp8_kernel_rows import PLAIN_ROWS, ROWS

        return (PLAIN_ROWS if takes_plain_triton(weights.device, weights.recipe) else ROWS)[weights.recipe]

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        rows = self.rows(problem.weights)
        if not _stays(problem):
            return sorted_rows.forward(_with_rows_here(problem), save, rows)
        from amoeba.kernels.launch.plan import planned

        both, codes = save == "h" and rows.goes_back, _codes(problem)
        due = [each.prepare(weight, both=both) for weight, each in codes]
        what = ("forward", *due, both, save, *_constants(problem))
        tensors = (*triton.pass_tensors(problem), *(tensor for _, each in codes for tensor in each.tensors()))
        found = planned(what, tensors, lambda: sorted_rows.forward(problem, save, rows))
        for is_due, (weight, each) in zip(due, codes, strict=True):
            if is_due:
                each.wrote(weight, both=both)
        return found

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        rows = self.rows(problem.weights)
        codes = _codes(problem) if rows.goes_back else []
        if saved is None or not _stays(problem) or not all(each.has_transposed(weight) for weight, each in codes):
            return sorted_rows.backward(_with_rows_here(problem), saved, dy_TH, needs, rows)  # may write codes
        from amoeba.kernels.launch.plan import planned

        what = ("backward", needs, graph_is_freed(), *_constants(problem))
        of_codes = (tensor for _, each in codes for tensor in each.tensors())
        tensors = (*triton.pass_tensors(problem), dy_TH, *saved, *of_codes)
        return planned(what, tensors, lambda: sorted_rows.backward(problem, saved, dy_TH, needs, rows))


def _stays(problem: Problem) -> bool:
    """Whether the weights are read, and their codes kept, where they are: a pass can be repeated as a list of launches.
    (Those that begin at no multiple of 16 bytes are copied by each pass.)"""
    weights = problem.weights
    at = (place_of(weights.gate_up_EJH), place_of(weights.down_EHI))
    return problem.rows > 0 and problem.overlapped is None and not any(place % 16 for place in at)


def _with_rows_here(problem: Problem) -> Problem:
    """Rows of other processes have come, and are counted: x and dy are quantised as a whole, and codes and scales of
    saved rows lie in one tensor, which cannot be cut shorter."""
    overlapped = problem.overlapped
    if overlapped is None:
        return problem
    if overlapped.under_way:
        overlapped.wait()
    return problem._replace(most_rows=overlapped.room(problem.most_rows))


def _codes(problem: Problem) -> list[tuple[Tensor, WeightCodes]]:
    from amoeba.backends.fp8_weights import codes_of

    weights = problem.weights
    return [(weight, codes_of(weight, weights.weight_format)) for weight in (weights.gate_up_EJH, weights.down_EHI)]


def _constants(problem: Problem) -> tuple:
    """What a pass depends on besides its tensors."""
    weights = problem.weights
    return "fp8", weights.recipe, takes_plain_triton(weights.device, weights.recipe), *triton.pass_constants(problem)


def why_not_on(device: torch.device, weights: Any, recipe: str = "fp8") -> str | None:
    """Why the kernels do not take these experts, once they are there; or None."""
    return why_not_there(device, weights, recipe) or why_not_shaped(weights)


def why_not_there(device: torch.device, weights: Any, recipe: str = W8A8) -> str | None:
    """... whatever their sizes and layout are."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability[0] != 9 and recipe not in PLAIN_TRITON and recipe != AUTO:
        return f"needs a Hopper GPU (compute capability 9.0); these weights are on {device}"
    if capability[0] == 9 and recipe in ("mxfp8", "nvfp4"):
        # An earlier version had wrong gradients on an H200 (2026-11-18, dev/log/fp8-training.md); this one never ran.
        return f"is not proven for {recipe} on Hopper, where it would be emulated"
    if capability < FIRST_WITH_FP8:
        return f"needs a GPU with fp8 (compute capability 8.9 or later); these weights are on {device}"
    return triton.why_not_on(device, weights.dtype)


def takes_plain_triton(device: torch.device, recipe: str) -> bool:
    if recipe in ("mxfp8", "nvfp4"):
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9


def why_not_shaped(weights: Any) -> str | None:
    """Why the kernels do not take experts of these sizes, dtype and layout, on whatever GPU; or None."""
    if (reason := why_not_sized(weights)) is not None:
        return reason
    for name, weight in (("gate_up", weights.gate_up_EJH), ("down", weights.down_EHI)):
        if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
            return f"needs {name} to be contiguous; its strides are {weight.stride()}"
    return None


def why_not_sized(weights: Any) -> str | None:
    """... whatever their layout is."""
    if weights.dtype != torch.bfloat16:
        return f"combines fp8 with bf16 weights; these weights are {weights.dtype}"
    for name, width in (("H", weights.hidden), ("I", weights.intermediate)):
        if width % WIDTH:
            return f"needs {name} to be a multiple of {WIDTH}; it is {width}"
    if weights.activation.interleaved:
        return "needs all gate rows before all up rows; here they are interleaved"
    return None


BACKEND = Fp8TritonBackend()
