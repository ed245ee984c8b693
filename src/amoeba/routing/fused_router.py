"""The router's kernels as one differentiable operator, `torch.ops.amoeba.fused_router`. `amoeba.routing.route` uses it.

T tokens · K experts per token · E experts

    if why_not(logits_TE, config) is None:
        expert_TK, weight_TK, scores_TE = fused_route(logits_TE, config, bias_E)

Gradients flow from weight_TK and scores_TE to the logits; the bias takes part in the choice alone and gets none.
Importing this file does not import Triton: the first call does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core import operators
from amoeba.core.config import RouterConfig
from amoeba.core.operators import Operand, operands_of
from amoeba.routing.forced_choice import is_forced

# of amoeba.kernels.router, which may not be imported here
MAX_COLUMNS, MAX_TOP_K = 512, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCORES = ("softmax", "sigmoid", "topk_softmax")

_FIELDS = tuple(operand.name for operand in operands_of(RouterConfig))
_TRITON = importlib.util.find_spec("triton") is not None


def why_not(logits_TE: Tensor, config: RouterConfig) -> str | None:
    if not _TRITON:
        return "needs Triton, which is not installed"
    if logits_TE.device.type != "cuda":
        return f"computes on CUDA devices; these logits are on {logits_TE.device}"
    if torch.cuda.get_device_capability(logits_TE.device) < (8, 0):
        return "needs compute capability 8.0"
    if is_forced(logits_TE):
        return "chooses by itself; here the experts are given (amoeba.replay)"
    return why_not_shape(logits_TE.dtype, config)


def why_not_shape(dtype: torch.dtype, config: RouterConfig) -> str | None:
    """The part of `why_not` that asks neither for a device nor for Triton."""
    if dtype not in DTYPES:
        return f"takes fp32, bf16 and fp16; these logits are {dtype}"
    if config.score not in SCORES:
        return f"scores by {', '.join(SCORES)}; this router's score is {config.score}"
    grouped = config.topk_group < config.n_group
    groups = config.n_group if grouped else 1
    columns = _power_of_two(groups) * _power_of_two(config.num_experts // groups)
    if columns > MAX_COLUMNS:
        return f"holds a row in registers, {MAX_COLUMNS} columns at most; these experts fill {columns}"
    if config.top_k > MAX_TOP_K:
        return f"makes a pass for each choice, {MAX_TOP_K} at most; top_k is {config.top_k}"
    return None


def fused_route(
    logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None, *, scores: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """expert_TK (int64, best first), weight_TK (fp32), scores_TE (fp32): `route` without noise and capacity.

    scores: False if they are not needed; they are empty then, and nothing is kept of them, unless the gradient of
    weights that are not renormalised needs them.
    """
    bias_E = None if bias_E is None else bias_E.detach()
    renormalised = config.renormalize or config.score == "topk_softmax"
    flat = (getattr(config, name) for name in _FIELDS)
    weight_TK, scores_TE, expert_TK = _operator(logits_TE, bias_E, scores or not renormalised, *flat)
    return expert_TK, weight_TK, scores_TE


def choose(logits_TE: Tensor, config: RouterConfig, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """expert_TK and weight_TK, rounded to its dtype, where no gradient is asked for."""
    from amoeba.kernels.router import router_forward

    return router_forward(logits_TE, config, None, scores=False, weight_dtype=weight_dtype)[:2]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _forward(logits_TE: Tensor, bias_E: Tensor | None, scores: bool, *config: Any) -> tuple[Tensor, Tensor, Tensor]:
    from amoeba.kernels.router import router_forward

    expert_TK, weight_TK, scores_TE = router_forward(logits_TE, RouterConfig(*config), bias_E, scores=scores)
    return weight_TK, scores_TE, expert_TK


def _fake(logits_TE: Tensor, bias_E: Tensor | None, scores: bool, *config: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    top_k = RouterConfig(*config).top_k
    return (
        logits_TE.new_empty((num_tokens, top_k), dtype=torch.float32),
        logits_TE.new_empty((num_tokens, num_experts) if scores else 0, dtype=torch.float32),
        logits_TE.new_empty((num_tokens, top_k), dtype=torch.int64),
    )


def _keep(arguments: tuple) -> tuple:
    """1 - σ(x) cannot be had from σ(x) close to 1; a softmax needs nothing of the logits but their dtype."""
    logits_TE, _, scores, *config = arguments
    kept = logits_TE if RouterConfig(*config).score == "sigmoid" else logits_TE.new_empty(0)
    return kept, None, scores, *config


def _backward(arguments: tuple, saved: tuple, gradients: Sequence[Any], needs: Sequence[bool]) -> list:
    from amoeba.kernels.router import router_backward

    logits_TE, _, _, *flat = arguments
    weight_TK, scores_TE, expert_TK = saved
    config = RouterConfig(*flat)
    dweight_TK, dscores_TE = gradients
    logits, dtype = logits_TE if config.score == "sigmoid" else None, logits_TE.dtype
    return [router_backward(expert_TK, weight_TK, scores_TE, dweight_TK, dscores_TE, logits, config, dtype)]


def _fake_backward(arguments: tuple, saved: tuple, gradients: Sequence[Any], needs: Sequence[bool]) -> list:
    logits_TE, _, _, *flat = arguments
    weight_TK = saved[0]
    return [weight_TK.new_empty((weight_TK.shape[0], RouterConfig(*flat).num_experts), dtype=logits_TE.dtype)]


_LOGITS = Operand("logits", "Tensor", True)
# the ids come last: torch.library.opcheck adds up all results in the dtype of the first
_operator = operators.define(
    "fused_router",
    (_LOGITS, Operand("bias", "Tensor?"), Operand("scores", "bool"), *operands_of(RouterConfig)),
    ("weight", "scores", "expert"),
    forward=_forward,
    backward=_backward,
    fake=_fake,
    fake_backward=_fake_backward,
    differentiable_results=2,
    saved=(0, 1, 2),
    keep=_keep,
    remedy="Route fp64 logits where you need them, or use the functions of amoeba.proof.reference under autograd.",
)
