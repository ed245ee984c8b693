"""`triton` for quantised experts: our kernels, which dequantise a tile of weights as they load it.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

All of a pass is that of `triton`, but for the products with the weights themselves. Where rows are quantised as well
(`QuantisedExperts.products`) a pass without gradients is that of experts that train in fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import fp8_choice, sorted_rows, triton
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.fp8_choice import decodes_w8a8, takes_w8a8, why_no_w8a8_kernel, with_products_for
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import graph_is_freed
from amoeba.precision.formats import E2M1, E4M3, IN_BLOCKS, MXFP4, Format
from amoeba.precision.quantised_experts import QuantisedExperts

# Up to this many tokens a pass without gradients decodes, as in `triton`.
DECODE_TOKENS = triton.DECODE_TOKENS
# In half precision also more, by expert, where each has so few on average: at 32 of them fp8 takes 323 us in place of
# 365, MXFP4 329 for 350, NVFP4 363 for 480 (512 tokens of Qwen3-30B's layer, H200, dev/log). More slots than these
# were not timed.
DECODE_SLOTS_PER_EXPERT, DECODE_SLOTS = 32, 4096
# Of MXFP4 on Hopper fewer: at 32 of each expert sorted rows in tiles of 64 take 303 us in place of 315 (Qwen3-30B),
# 1262 for 1300 (DeepSeek-V3) and 652 for 685 (Mixtral); at 16 they take 315 in place of 224. Since then long rows are
# decoded in longer steps, by which Mixtral's take 0.8 of the time: those are decoded as the other formats are.
DECODE_SLOTS_MXFP4, LONG_ROWS = 28, 4096


class QuantisedTritonBackend(PassesBackend):
    """Importing this file does not import Triton: the first pass does."""

    name, summary, kinds = "triton", "our kernels on the GPU, which dequantise as they load", (QuantisedExperts,)
    operator_name = "quantised_triton"
    traced = SavedRows(map_dtype=torch.int32, low_ranks=triton.low_ranks)

    def preference(self, device: torch.device) -> int:
        return triton.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        assert isinstance(weights, QuantisedExperts)
        if weights.format.element not in (E4M3, E2M1, IN_BLOCKS):  # kernels tell the first two by their bits
            return f"reads e4m3, e2m1 and blocks; these weights are in {weights.format.element.name}"
        if (reason := triton.why_not_on(weights.device, weights.dtype)) is not None:
            return reason
        asked = weights.products == "w8a8" and request.lora is None
        return why_no_w8a8_kernel(weights) if asked else None

    def row_format(self, request: Request) -> Format | None:
        return fp8_choice.row_format(request)

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return with_products_for(problem, gradient)  # factors are rounded where they are read

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if w8a8 := takes_w8a8(problem, save):
            few = decodes_w8a8(problem)
        else:
            few = save != "h" and (is_few(problem) or is_few_of_each(problem, problem.weights.num_experts))
        if few:
            from amoeba.kernels.decode import decode

            return decode(problem, e4m3=w8a8), None
        if w8a8:
            return self._forward_w8a8(problem), None
        return self.forward_sorted(problem, save)

    def _forward_w8a8(self, problem: Problem) -> Tensor:
        from amoeba.backends.fp8_kernel_rows import W8a8KernelRows
        from amoeba.kernels.launch.plan import planned

        what = ("forward", self.operator_name, "w8a8", *pass_constants(problem))
        tensors = triton.pass_tensors(problem)
        return planned(what, tensors, lambda: sorted_rows.forward(problem, "nothing", W8a8KernelRows))[0]

    def forward_sorted(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        """However few rows there are."""
        from amoeba.backends.quantised_rows import QuantisedRows
        from amoeba.kernels.launch.plan import planned

        what = ("forward", self.operator_name, save, *pass_constants(problem))
        tensors = triton.pass_tensors(problem)
        return planned(what, tensors, lambda: sorted_rows.forward(problem, save, QuantisedRows))

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        from amoeba.backends.quantised_rows import QuantisedRows
        from amoeba.kernels.launch.plan import planned

        what = ("backward", self.operator_name, needs, saved is None, graph_is_freed(), *pass_constants(problem))
        tensors = (*triton.pass_tensors(problem), dy_TH, *(saved or ()))
        return planned(what, tensors, lambda: sorted_rows.backward(problem, saved, dy_TH, needs, QuantisedRows))


def is_few(problem: Problem) -> bool:
    return 0 < problem.x_TH.shape[0] <= DECODE_TOKENS


def is_few_of_each(problem: Problem, experts: int) -> bool:
    """Whether a pass of more tokens without gradients is decoded, too, by expert. experts: as many as the layer has, of
    which the problem's may be some."""
    most = DECODE_SLOTS_PER_EXPERT
    weights, device = problem.weights, problem.x_TH.device
    if weights.format is MXFP4 and weights.hidden < LONG_ROWS and device.type == "cuda":
        from amoeba.kernels.decode.configuration import can_overlap

        most = DECODE_SLOTS_MXFP4 if can_overlap(device) else most
    few = problem.rows <= min(most * experts, DECODE_SLOTS)
    return few and problem.x_TH.shape[0] > DECODE_TOKENS and problem.x_TH.element_size() == 2


def pass_constants(problem: Problem) -> tuple:
    """What a pass depends on besides its tensors."""
    return *triton.pass_constants(problem), problem.weights.constants()


BACKEND = QuantisedTritonBackend()
