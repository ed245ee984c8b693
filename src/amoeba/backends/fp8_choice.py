"""What `--precision auto` chooses: fp8 where it was measured to be faster, the weights' own dtype elsewhere.

E experts

    weights = settled(request)          # experts that train with precision="auto", by a recipe or without one
    if takes_w8a8(problem, save): ...   # of frozen experts that are in e4m3, see `QuantisedExperts.products`

Three things decide about experts that train: whether our kernels serve the layer, since fp8 in plain torch is slower
than bf16; how large an expert is, since small products are over before they are faster; and how many rows it gets,
since its codes are written anew in each pass, however few rows use them. Where weights are promised not to change
(`amoeba.precision.UnchangedWeights`) only the first pass writes codes, and fewer rows pay. Nothing else tells as much:
weights without gradients may be written through `.data`, too.

Frozen experts have their codes, so that fewer rows and smaller experts pay. A pass with gradients or LoRA factors keeps
products in the dtype of x.
"""

from __future__ import annotations

import torch

from amoeba.backends.backend import Request
from amoeba.backends.fp8_triton import BACKEND, takes_plain_triton, why_not_sized, why_not_there
from amoeba.backends.triton import DECODE_SLOTS, DECODE_TOKENS
from amoeba.core.problem import Problem, Save
from amoeba.core.weights import AnyExperts
from amoeba.cpu.pointers import place_of
from amoeba.precision.formats import FP8_128_ROWS, Format
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.precision.recipes import AUTO, UNCHANGED, W8A8, Fp8Experts, with_precision
from amoeba.precision.unchanged_weights import promise

RECIPE = "fp8"
# bf16 over fp8, codes written in each pass (H200, document `fp8-few-rows` of a59005f, 2026-11-17):
#                          step                     forward alone
#   rows per expert        2048  1024   512   256   2048  1024   512   256
#   H=2048 I=768                 1.08  1.00  0.89         1.06  0.89  0.72
#   H=2048 I=1024          1.14  1.08  1.00         1.20  1.05  0.91
#   H=4096 I=1024                1.11  1.02  0.91         1.10  0.91  0.73
# What fp8 saves grows with the rows, what it costs to write the codes does not.
FEWEST_ROWS_PER_EXPERT = 1024
# With codes that are there: steps 1.20 to 1.27, forward passes 1.37 to 1.49 at each number of rows above (ibid.). Fewer
# were not measured. Two steps of 256 rows are worth their codes (0.89, then 1.20 or more), three forward passes are.
FEWEST_ROWS_UNCHANGED = 256
# Smaller experts (H200, document `fp8-small-layers-unfinished` of bf0fbb0, 2026-11-17), the codes written, then there:
#                          step          forward alone
#   H=768 I=704, 2048      1.01, 1.06    0.90, 1.00
#   H=768 I=704, 1024      0.97, 1.05    0.84, 1.00
#   H=1024 I=512, 1024     0.95, 1.04    0.87, 1.05
#   H=512 I=256, 1024      0.87, 0.93    0.76, 0.88
# Nothing between these and the table above was measured.
LEAST_SIZE = 2048 * 768  # H · I
# Of frozen experts in fp8-128, rows per expert: us by dequantised weights and by codes of rows, as they were multiplied
# by the kernels of training with codes kept (H200, 2026-11-18):
#   qwen3, 32 and 256           321, 887      211, 429
#   dsv3 (64 experts), 64, 512  1582, 7750    782, 2777
#   mixtral, 128, 1024          1343, 5975    629, 2723
# Up to 64 tokens are decoded, which takes the time of reading the weights.
FEWEST_ROWS_FROZEN = 32
# Large experts are decoded by codes of rows from fewer on, also up to 64 tokens: 377 us for 424 with 16 of each of
# mixtral's, 742 for 843 of dsv3's; 702 for 725 with 8 of those, 476 for 464 with one. Sorted rows take 481, 804, 797
# and 588. From MOST_ROWS_DECODED on many experts have more rows than a chunk, which reads their weights again.
FEWEST_ROWS_LARGE, LARGE_HIDDEN, MOST_ROWS_DECODED = 16, 4096, 24
# The second table above, codes being there: 1.05 and 1.00 times as fast as plain bf16, which takes less time than
# dequantising the weights and the same products.
LEAST_SIZE_FROZEN = 1024 * 512


def settled(request: Request, rows: int | None = None, experts: int | None = None) -> AnyExperts:
    """The weights of a request as they will be computed with: "auto" becomes fp8, or no recipe.

    rows, experts: by which it is settled, where the request is a part of them; None: its own."""
    weights = request.weights
    if not isinstance(weights, Fp8Experts) or weights.recipe != AUTO:
        return weights
    return with_precision(weights, RECIPE if why_not(request, rows, experts) is None else UNCHANGED)


def why_not(request: Request, rows: int | None = None, experts: int | None = None) -> str | None:
    """Why "auto" leaves these experts in their own dtype; or None."""
    if (reason := BACKEND.why_not(request)) is not None:
        return reason
    if (reason := too_small(request.weights) or not_measured(request.weights.device)) is not None:
        return reason
    rows = request.routing.expert_TK.numel() if rows is None else rows
    experts = request.weights.num_experts if experts is None else experts
    unchanged = promise() is not None
    fewest = FEWEST_ROWS_UNCHANGED if unchanged else FEWEST_ROWS_PER_EXPERT
    if rows < fewest * experts:
        said = ", with weights unchanged" if unchanged else ""
        return f"fp8 pays off with {fewest} rows per expert or more{said}; here {experts} experts get {rows}"
    return None


def takes_w8a8(problem: Problem, save: Save) -> bool:
    """Whether codes of rows are multiplied in this pass of `QuantisedExperts`."""
    weights = problem.weights
    if weights.products == UNCHANGED or save != "nothing" or problem.lora is not None:
        return False
    slots, large = _slots(problem), weights.hidden >= LARGE_HIDDEN
    if weights.products == AUTO and slots < (FEWEST_ROWS_LARGE if large else FEWEST_ROWS_FROZEN) * weights.num_experts:
        return False
    if weights.products == AUTO and problem.expert_TK.shape[0] <= DECODE_TOKENS and not large:
        return False
    if weights.products == AUTO and why_not_w8a8(weights) is not None:
        return False
    return slots > 0


def decodes_w8a8(problem: Problem) -> bool:
    """Whether a pass that takes w8a8 is decoded by expert, rather than by sorted rows."""
    few = _slots(problem) < MOST_ROWS_DECODED * problem.weights.num_experts and problem.rows <= DECODE_SLOTS
    return few and problem.weights.hidden >= LARGE_HIDDEN and problem.x_TH.element_size() == 2


def _slots(problem: Problem) -> int:
    """Those that may have an expert here."""
    return problem.rows if problem.most_rows is None else problem.most_rows


def row_format(request: Request) -> Format | None:
    """As `Backend.row_format`, of frozen experts. "auto" is settled by the rows that a process gets, so too late."""
    weights, factors = request.weights, () if request.lora is None else request.lora.six()
    assert isinstance(weights, QuantisedExperts)
    read = (request.x_TH, request.routing.weight_TK, *weights.tensors(), *factors)
    gradient = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in read)
    return FP8_128_ROWS if weights.products == W8A8 and request.lora is None and not gradient else None


def why_not_w8a8(weights: QuantisedExperts) -> str | None:
    """Why no pass over frozen experts multiplies codes of rows, however many there are, as the rest of a sentence that
    begins with w8a8; or None."""
    if (reason := why_no_w8a8_kernel(weights)) is not None:
        return reason
    hidden, inner = weights.hidden, weights.intermediate
    if weights.products == AUTO and hidden * inner < LEAST_SIZE_FROZEN:
        return f"pays for experts of 1024 x 512 numbers and more, these are of {hidden} x {inner}"
    return None


def why_no_w8a8_kernel(weights: QuantisedExperts) -> str | None:
    reason = weights.why_not_w8a8() or why_not_there(weights.device, weights) or why_not_sized(weights)
    if reason is not None:
        return reason
    stored = (*weights.stored_gate_up, *weights.stored_down)
    aligned = not any(place_of(data) % 16 for data in (weights.stored_gate_up[0], weights.stored_down[0]))
    if not (aligned and all(tensor is None or tensor.is_contiguous() for tensor in stored)):
        return "needs experts next to each other, these lie in slots with something between them"
    return None


def with_products_for(problem: Problem, gradient: bool) -> Problem:
    """Where gradients are taken, rows stay as they are, also in a forward pass that saves nothing for them."""
    if not gradient or problem.weights.products == UNCHANGED:
        return problem
    return problem._replace(weights=problem.weights.with_products(UNCHANGED))


def not_measured(device: torch.device) -> str | None:
    """Why "auto" does not take fp8 on this GPU; or None."""
    if takes_plain_triton(device, RECIPE):
        return "fp8 was measured on Hopper GPUs alone; ask for it by name on others"
    return None


def too_small(weights: AnyExperts) -> str | None:
    """Why "auto" does not take fp8 for these experts, however many rows they get; or None."""
    hidden, inner = weights.hidden, weights.intermediate
    if hidden * inner >= LEAST_SIZE:
        return None
    return f"fp8 pays off for experts of 2048 x 768 numbers or more; these have {hidden} x {inner}"
