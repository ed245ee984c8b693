"""precision="auto": fp8 where it was measured to be faster, and the weights' own dtype elsewhere.

E experts

    weights = settled(request)          # experts that train, by a recipe or without one

Three things decide: whether our kernels serve the layer, since fp8 in plain torch is slower than bf16; how large an
expert is, since small products are over before they are faster; and how many rows it gets, since its codes are written
anew in each pass, however few rows use them. Where weights are promised not to change
(`amoeba.precision.UnchangedWeights`) only the first pass writes codes, and fewer rows pay. Nothing else tells as much:
weights without gradients may be written through `.data`, too.
"""

from __future__ import annotations

from amoeba.backends.backend import Request
from amoeba.backends.fp8_triton import BACKEND
from amoeba.core.weights import AnyExperts
from amoeba.precision.recipes import AUTO, UNCHANGED, Fp8Experts, with_precision
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
    if (reason := too_small(request.weights)) is not None:
        return reason
    rows = request.routing.expert_TK.numel() if rows is None else rows
    experts = request.weights.num_experts if experts is None else experts
    unchanged = promise() is not None
    fewest = FEWEST_ROWS_UNCHANGED if unchanged else FEWEST_ROWS_PER_EXPERT
    if rows < fewest * experts:
        said = ", with weights unchanged" if unchanged else ""
        return f"fp8 pays from {fewest} rows per expert on{said}, here {rows} are for {experts}"
    return None


def too_small(weights: AnyExperts) -> str | None:
    """Why "auto" does not take fp8 for these experts, however many rows they get; or None."""
    hidden, inner = weights.hidden, weights.intermediate
    if hidden * inner >= LEAST_SIZE:
        return None
    return f"fp8 pays for experts of 2048 x 768 numbers and more, these are of {hidden} x {inner}"
