"""`triton`: our own kernels on the GPU, forward and backward without a host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

Rows are sorted by a counting sort on the device. The up projection gathers the rows of x as it loads them and activates
in its epilogue; the routing weights enter in the gather-and-sum at the end, in fp32. Backward starts from dA' = dy ·
down: one pass over it and h gives dh, s·a and ds, so that y is never saved. Few tokens without gradients, or few of
each expert, are decoded by kernels that read each weight once and sort nothing.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.backends import sorted_rows
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.torch_internals import graph_is_freed
from amoeba.core.weights import ExpertWeights

if TYPE_CHECKING:
    from amoeba.backends.triton_rows import TritonRows

# Up to this many tokens a pass without gradients decodes: a slot or an expert at a time, nothing is sorted.
DECODE_TOKENS = 64
# In half precision also more, by expert, where this many of each are enough for even routing (its average and one
# standard deviation), and launches overlap. On an H200, up and down by expert against the whole pass over sorted rows:
# 300 : 355, 307 : 364 and 320 : 351 us with 128, 256 and 512 tokens of Qwen3-30B's layer, 678 : 804 with 128 of
# Mixtral's; with twice as many slots of an expert sorted rows are faster (dev/log, 2026-11-18).
MOST_OF_EACH, DECODE_SLOTS = 64, 4096

_TRITON_FOUND = importlib.util.find_spec("triton") is not None


def low_ranks(problem: Problem) -> tuple[int, int]:
    """How wide the saved rows of LoRA are."""
    from amoeba.kernels.lora.epilogue import padded_rank

    lora = problem.lora
    if lora is None:
        return 0, 0
    up, down = (lora.gate_lora_a, None if lora.shares_a else lora.up_lora_a), (lora.down_lora_a,)
    of_up, of_down = (sum(factor.shape[1] for factor in each if factor is not None) for each in (up, down))
    return padded_rank(of_up), padded_rank(of_down)


class TritonBackend(PassesBackend):
    """Importing this file does not import Triton: the first pass does."""

    name, summary, kinds = "triton", "our kernels on the GPU", (ExpertWeights,)
    traced = SavedRows(map_dtype=torch.int32, low_ranks=low_ranks)
    adds_onto = overlaps = True

    def preference(self, device: torch.device) -> int:
        return 10 if device.type == "cpu" else 40

    def why_not(self, request: Request) -> str | None:
        return why_not_on(request.weights.device, request.weights.dtype)

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        """Factors are rounded where they are read: in decoding, those of chosen experts alone."""
        return problem

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        if problem.overlapped is not None:
            return self._forward(problem, save)
        if save != "h" and (is_few(problem) or is_few_of_each(problem, problem.weights.num_experts)):
            from amoeba.kernels.decode import decode

            y_TH = decode(problem)
            return y_TH if problem.onto_TH is None else problem.onto_TH + y_TH, None
        return self.forward_sorted(problem, save)

    def forward_sorted(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        """However few rows there are."""
        from amoeba.kernels.launch.plan import planned

        what = ("forward", self.name, save, *pass_constants(problem))
        return planned(what, pass_tensors(problem), lambda: self._forward(problem, save))

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        if problem.overlapped is not None:  # what it launches is not its own alone, and cannot be repeated as such
            return self._backward(problem, saved, dy_TH, needs)
        from amoeba.kernels.launch.plan import planned

        what = ("backward", self.name, needs, saved is None, graph_is_freed(), *pass_constants(problem))
        tensors = (*pass_tensors(problem), dy_TH, *(saved or ()))
        return planned(what, tensors, lambda: self._backward(problem, saved, dy_TH, needs))

    def _forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(problem, save, _rows_of(problem))

    def _backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, _rows_of(problem))


def _rows_of(problem: Problem) -> type[TritonRows]:
    if problem.overlapped is not None and problem.overlapped.under_way:
        from amoeba.backends.overlapped_dispatch import OverlappedRows

        return OverlappedRows
    from amoeba.backends.triton_rows import TritonRows

    return TritonRows


def pass_tensors(problem: Problem) -> tuple[Tensor | None, ...]:
    """All that a pass reads."""
    x = problem.quantised_x
    return *problem.tensors(), problem.onto_TH, *(() if x is None else (x.data, x.scales))


def pass_constants(problem: Problem) -> tuple:
    """What it depends on besides."""
    lora = problem.lora
    of_lora = None if lora is None else (lora.scaling, lora.shares_a)
    return problem.weights.activation, of_lora, problem.most_rows


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve such weights there, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"supports bf16, fp16 and fp32; these weights are {dtype}"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "needs compute capability 8.0 or newer"
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"computes on a CUDA device (or in Triton's interpreter); these weights are on {device}"
    elif dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bf16 products"
    return None if _TRITON_FOUND else "needs Triton, which is not installed"


def is_few(problem: Problem) -> bool:
    return 0 < problem.x_TH.shape[0] <= DECODE_TOKENS


def is_few_of_each(problem: Problem, experts: int) -> bool:
    """Whether a pass of more tokens without gradients is decoded, too, by expert. experts: as many as the layer has, of
    which the problem's may be some. With LoRA factors or weights stored (H, J) it was not timed."""
    x_TH, weights = problem.x_TH, problem.weights
    if x_TH.element_size() > 2 or problem.lora is not None or not DECODE_TOKENS < problem.rows <= DECODE_SLOTS:
        return False
    from amoeba.kernels.decode.configuration import can_overlap, usual_slots

    whole_rows = weights.gate_up_EJH.stride(2) == weights.down_EHI.stride(2) == 1
    enough = whole_rows and usual_slots(problem.rows, experts) <= MOST_OF_EACH
    return enough and x_TH.shape[0] > DECODE_TOKENS and can_overlap(x_TH.device)


BACKEND = TritonBackend()
