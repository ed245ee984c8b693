"""The router's kernels as one differentiable operator, `torch.ops.amoeba.fused_router`. `amoeba.routing.route` uses it.

T tokens · K experts per token · E experts

    if why_not(logits_TE, config) is None:
        expert_TK, weight_TK, scores_TE = fused_route(logits_TE, config, bias_E)

Gradients flow from weight_TK and scores_TE to the logits; the bias takes part in the choice alone and gets none.
Importing this file does not import Triton: the first call does.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from amoeba.backends.transforms import differentiable, once
from amoeba.config import RouterConfig

# of amoeba.kernels.router, which may not be imported here
MAX_COLUMNS, MAX_TOP_K = 512, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TRITON = importlib.util.find_spec("triton") is not None


def why_not(logits_TE: Tensor, config: RouterConfig) -> str | None:
    """Why these logits are not for the fused router, or None."""
    if not _TRITON:
        return "needs Triton, which is not installed"
    if logits_TE.device.type != "cuda":
        return f"computes on CUDA devices, these logits are on {logits_TE.device}"
    if torch.cuda.get_device_capability(logits_TE.device) < (8, 0):
        return "needs compute capability 8.0"
    return why_not_shape(logits_TE.dtype, config)


def why_not_shape(dtype: torch.dtype, config: RouterConfig) -> str | None:
    """The part of `why_not` that asks neither for a device nor for Triton."""
    if dtype not in DTYPES:
        return f"takes fp32, bf16 and fp16, these logits are {dtype}"
    grouped = config.topk_group < config.n_group
    groups = config.n_group if grouped else 1
    columns = _power_of_two(groups) * _power_of_two(config.num_experts // groups)
    if columns > MAX_COLUMNS:
        return f"holds a row in registers, {MAX_COLUMNS} columns at most; these experts fill {columns}"
    if config.top_k > MAX_TOP_K:
        return f"makes a pass for each choice, {MAX_TOP_K} at most; top_k is {config.top_k}"
    return None


def fused_route(logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """expert_TK (int64, best first), weight_TK (fp32), scores_TE (fp32): `route` without noise and capacity."""
    bias_E = None if bias_E is None else bias_E.detach()
    weight_TK, scores_TE, expert_TK = _fused_router(logits_TE, bias_E, *_flat(config))
    return expert_TK, weight_TK, scores_TE


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _flat(config: RouterConfig) -> tuple[int, str, bool, float, int, int, str]:
    return (
        config.top_k,
        config.score,
        config.renormalize,
        config.scaling_factor,
        config.n_group,
        config.topk_group,
        config.group_score,
    )


def _config(num_experts: int, flat: tuple) -> RouterConfig:
    top_k, score, renormalize, scaling_factor, n_group, topk_group, group_score = flat
    return RouterConfig(num_experts, top_k, score, renormalize, scaling_factor, n_group, topk_group, group_score)


_CONFIG = "int top_k, str score, bool renormalize, float scaling_factor, int n_group, int topk_group, str group_score"
_NUM_CONFIG = 7
_library = torch.library.Library("amoeba", "FRAGMENT")
# the ids come last: torch.library.opcheck adds up all results in the dtype of the first
_library.define(f"fused_router(Tensor logits, Tensor? bias, {_CONFIG}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "fused_router_backward(Tensor expert, Tensor weight, Tensor scores, Tensor? dweight, Tensor? dscores, "
    f"Tensor? logits, {_CONFIG}, ScalarType dtype) -> Tensor"
)


def _forward_impl(logits_TE: Tensor, bias_E: Tensor | None, *flat: object) -> tuple[Tensor, Tensor, Tensor]:
    from amoeba.kernels.router import router_forward

    expert_TK, weight_TK, scores_TE = router_forward(logits_TE, _config(logits_TE.shape[1], flat), bias_E)
    return weight_TK, scores_TE, expert_TK


def _backward_impl(
    expert_TK: Tensor,
    weight_TK: Tensor,
    scores_TE: Tensor,
    dweight_TK: Tensor | None,
    dscores_TE: Tensor | None,
    logits_TE: Tensor | None,
    *flat_and_dtype: object,
) -> Tensor:
    from amoeba.kernels.router import router_backward

    *flat, dtype = flat_and_dtype
    config = _config(scores_TE.shape[1], tuple(flat))
    assert isinstance(dtype, torch.dtype)
    return router_backward(expert_TK, weight_TK, scores_TE, dweight_TK, dscores_TE, logits_TE, config, dtype)


def _fake_forward(logits: Tensor, bias: Tensor | None, top_k: int, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty((num_tokens, top_k), dtype=torch.float32),
        logits.new_empty((num_tokens, num_experts), dtype=torch.float32),
        logits.new_empty((num_tokens, top_k), dtype=torch.int64),
    )


def _fake_backward(expert: Tensor, weight: Tensor, scores: Tensor, *others: object) -> Tensor:
    dtype = others[-1]
    assert isinstance(dtype, torch.dtype)
    return scores.new_empty(scores.shape, dtype=dtype)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    logits_TE, flat = inputs[0], inputs[2:]
    weight_TK, scores_TE, expert_TK = output
    # 1 - σ(x) cannot be had from σ(x) close to 1; a softmax needs nothing of the logits
    logits_kept = logits_TE if flat[1] == "sigmoid" else None
    ctx.save_for_backward(expert_TK, weight_TK, scores_TE, logits_kept)  # type: ignore[arg-type]
    ctx.mark_non_differentiable(expert_TK)
    ctx.set_materialize_grads(False)
    ctx.flat, ctx.dtype = flat, logits_TE.dtype  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, dweight_TK: Tensor | None, dscores_TE: Tensor | None, _: object
) -> tuple:
    nothing = (None,) * (1 + _NUM_CONFIG)
    if dweight_TK is None and dscores_TE is None:
        return (None, *nothing)
    expert_TK, weight_TK, scores_TE, logits_TE = ctx.saved_tensors  # type: ignore[attr-defined]
    dlogits_TE = _fused_router_backward(
        expert_TK,
        weight_TK,
        scores_TE,
        dweight_TK,
        dscores_TE,
        logits_TE,
        *ctx.flat,  # type: ignore[attr-defined]
        ctx.dtype,  # type: ignore[attr-defined]
    )
    return (dlogits_TE, *nothing)


_library.impl("fused_router", _forward_impl, "CompositeExplicitAutograd")
_library.impl("fused_router_backward", _backward_impl, "CompositeExplicitAutograd")
torch.library.register_fake("amoeba::fused_router", _fake_forward, lib=_library)
torch.library.register_fake("amoeba::fused_router_backward", _fake_backward, lib=_library)
_fused_router_backward = once(
    "fused_router",
    torch.ops.amoeba.fused_router_backward.default,
    _library,
    "Route fp64 logits where you need them, or use the functions of amoeba.proof.reference under autograd.",
)
_fused_router = differentiable(
    "fused_router", torch.ops.amoeba.fused_router.default, _setup_context, _backward, _library
)
