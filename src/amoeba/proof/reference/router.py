"""The reference for the router: literal loops over tokens, in plain torch and any dtype; its backward too.

    expert_TK, weight_TK = router_forward(logits_TE.double(), config)
    dlogits_TE = router_backward(grad_weight_TK, logits_TE.double(), expert_TK, config)

T tokens · K experts per token · E experts

Written from the definitions, sharing no code with amoeba.routing.router. Noise is left out: this is the router in
evaluation. Among equal scores the lower id wins; NaN counts as the largest. Where a token's choice hangs on a NaN, its
weights are NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amoeba.core.config import RouterConfig, unknown_score

# DeepSeek-V3's code adds this to the sum of sigmoid scores; the softmax routers add nothing
DENOMINATOR_FLOOR = 1e-20


def router_forward(logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts (int64, best first) and weights (dtype of logits_TE); E and 0 where capacity dropped a slot."""
    num_tokens = logits_TE.shape[0]
    expert_TK = torch.empty(num_tokens, config.top_k, dtype=torch.int64, device=logits_TE.device)
    weight_TK = torch.empty(num_tokens, config.top_k, dtype=logits_TE.dtype, device=logits_TE.device)
    for token in range(num_tokens):
        chosen, meaningless = _choose(logits_TE[token], config, bias_E)
        expert_TK[token] = torch.tensor(chosen, dtype=torch.int64, device=expert_TK.device)
        weight_TK[token] = math.nan if meaningless else _weigh(logits_TE[token], chosen, config)
    if config.capacity_factor is not None:
        _drop_over_capacity_(expert_TK, weight_TK, config, config.capacity_factor)
    return expert_TK, weight_TK


def router_backward(grad_weight_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, config: RouterConfig) -> Tensor:
    """The gradient of the logits, (T, E), given that of the weights.

    expert_TK is the choice before capacity: a dropped slot still took part in its token's normalisation. Its
    weight is the constant 0, so the caller passes gradient 0 for it.
    """
    dlogits_TE = torch.zeros_like(logits_TE)
    for token in range(logits_TE.shape[0]):
        logits_E, chosen_K = logits_TE[token], expert_TK[token]
        grad_K = grad_weight_TK[token] * config.scaling_factor
        dlogits_TE[token] = _token_backward(grad_K, logits_E, chosen_K, config)
    return dlogits_TE


def _token_backward(grad_K: Tensor, logits_E: Tensor, chosen_K: Tensor, config: RouterConfig) -> Tensor:
    _score(logits_E, config)  # refuses a score that is not computed here
    dlogits_E = torch.zeros_like(logits_E)
    if config.score == "sigmoid":
        score_K = _sigmoid(logits_E)[chosen_K]
        dscore_K = grad_K
        if config.renormalize:
            # w = σ / D with D = Σ_K σ + floor:  dσ_k = (g_k - Σ_K w_j g_j) / D
            denominator = score_K.sum() + DENOMINATOR_FLOOR
            dscore_K = (grad_K - (score_K / denominator * grad_K).sum()) / denominator
        dlogits_E[chosen_K] = dscore_K * score_K * (1 - score_K)
    elif config.score == "topk_softmax" or config.renormalize:
        # the probabilities of all experts cancel in p / Σ_K p, so those not chosen get exactly 0
        weight_K = _softmax(logits_E[chosen_K])
        if config.score == "softmax":  # undefined with the softmax over all, also where the chosen logits are finite
            weight_K = torch.where(_softmax(logits_E).isnan().any(), math.nan, weight_K)
        dlogits_E[chosen_K] = weight_K * (grad_K - (weight_K * grad_K).sum())
    else:
        # dlogit_j = p_j (g_j·[j ∈ K] - Σ_K p_i g_i): every expert gets a gradient through the sum over all
        probability_E = _softmax(logits_E)
        grad_E = torch.zeros_like(logits_E)
        grad_E[chosen_K] = grad_K
        dlogits_E = probability_E * (grad_E - (probability_E[chosen_K] * grad_K).sum())
    return dlogits_E


def _choose(logits_E: Tensor, config: RouterConfig, bias_E: Tensor | None) -> tuple[list[int], bool]:
    """The experts of a token, and whether that choice hangs on a NaN."""
    score_E = logits_E if config.score == "topk_softmax" else _score(logits_E, config)
    choice_E = score_E if bias_E is None else score_E + bias_E
    # an expert masked by -inf is the lowest there is, but a group that has another ranks above one that has none
    choice = choice_E.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
    size = config.num_experts // config.n_group
    groups = [range(group * size, (group + 1) * size) for group in range(config.n_group)]

    def group_rank(members: range) -> float:
        best_first = sorted((choice[expert] for expert in members), reverse=True)
        return best_first[0] if config.group_score == "max" else sum(best_first[:2])

    best_groups = sorted(groups, key=group_rank, reverse=True)[: config.topk_group]
    allowed = sorted(expert for members in best_groups for expert in members)
    chosen = sorted(allowed, key=lambda expert: choice[expert], reverse=True)[: config.top_k]
    return chosen, bool(choice_E.isnan().any())


def _weigh(logits_E: Tensor, chosen: list[int], config: RouterConfig) -> Tensor:
    if config.score == "topk_softmax":
        return _softmax(logits_E[chosen]) * config.scaling_factor
    weight_K = _score(logits_E, config)[chosen]
    if config.renormalize:
        weight_K = weight_K / (weight_K.sum() + (DENOMINATOR_FLOOR if config.score == "sigmoid" else 0.0))
    return weight_K * config.scaling_factor


def _score(logits_E: Tensor, config: RouterConfig) -> Tensor:
    match config.score:
        case "sigmoid":
            return _sigmoid(logits_E)
        case "softmax" | "topk_softmax":
            return _softmax(logits_E)
    raise unknown_score(config.score, "the reference")


def _sigmoid(logits: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-logits))


def _softmax(logits: Tensor) -> Tensor:
    exponential = torch.exp(logits - logits.max())
    return exponential / exponential.sum()


def _drop_over_capacity_(expert_TK: Tensor, weight_TK: Tensor, config: RouterConfig, capacity_factor: float) -> None:
    num_tokens = expert_TK.shape[0]
    capacity = math.ceil(capacity_factor * num_tokens * config.top_k / config.num_experts)
    taken = [0] * config.num_experts
    for slot in range(config.top_k):
        for token in range(num_tokens):
            expert = int(expert_TK[token, slot])
            if weight_TK[token, slot].isnan():  # kept, or all of the token might come out as zeros
                taken[expert] += 1
            elif taken[expert] >= capacity:
                expert_TK[token, slot] = config.num_experts
                weight_TK[token, slot] = 0
            else:
                taken[expert] += 1
