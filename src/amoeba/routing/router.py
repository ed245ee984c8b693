"""From router logits to experts and weights, and the losses that keep experts evenly used.

    routing = route(x_TH @ gate_EH.T, RouterConfig(num_experts=64, top_k=8), training=True)
    y_TH = experts(x_TH, routing, weights)
    loss = loss + 0.01 * load_balance_loss(routing, num_experts=64)

Nothing here waits for the device (only `Routing.check_values` does, and says so), everything but an explicit
generator goes through torch.compile(fullgraph=True), and results are bitwise equal from run to run.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · G groups of experts ·
S tokens per sequence · B = T/S sequences
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from amoeba.core.config import DENOMINATOR_FLOOR, RouterConfig, unknown_score
from amoeba.core.errors import bad_value
from amoeba.routing import fused_router


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token goes to, and with what weight.

    expert_TK: int32 or int64; an id outside [0, E) is a sentinel, a slot without an expert here.
    weight_TK: floating point; carries the gradient to the router.
    logits_TE: the logits that were scored (after noise, in the precision of the scores), for `z_loss`.
    scores_TE: softmax or sigmoid of the logits, before any choice; differentiable, for losses and statistics.
    trusted:   the weights need no `check_values`, because `route` made them.
    chosen_TK: the choice before capacity dropped any slot; None if it is the same as expert_TK.
    most_rows: the most slots that have an expert, if that is known without asking the device: buffers of sorted
               rows are then no larger. None: all may have one.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    logits_TE: Tensor | None = None
    scores_TE: Tensor | None = None
    trusted: bool = False
    chosen_TK: Tensor | None = None
    most_rows: int | None = None

    def __post_init__(self) -> None:
        expert_TK, weight_TK = self.expert_TK, self.weight_TK
        if expert_TK.dim() != 2 or expert_TK.shape[1] == 0:
            expected = "two dimensions, (tokens, experts per token), with at least one expert per token"
            remedy = (
                "flatten batch and sequence into one dimension of tokens; an id outside [0, E) stands for no expert"
            )
            raise bad_value("expert_TK", expected, f"shape {tuple(expert_TK.shape)}", remedy)
        if weight_TK.shape != expert_TK.shape:
            got, remedy = f"shape {tuple(weight_TK.shape)}", "pass one weight for each chosen expert"
            raise bad_value("weight_TK", f"the shape of expert_TK, {tuple(expert_TK.shape)}", got, remedy)
        if expert_TK.dtype not in (torch.int32, torch.int64):
            raise bad_value("expert_TK", "dtype int32 or int64", expert_TK.dtype, "convert it with .long()")
        if not weight_TK.dtype.is_floating_point:
            raise bad_value("weight_TK", "a floating dtype", weight_TK.dtype, "convert it with .float()")
        if weight_TK.device != expert_TK.device:
            remedy = "move one of them with .to(device)"
            raise bad_value("weight_TK", f"the device of expert_TK, {expert_TK.device}", weight_TK.device, remedy)

    @property
    def num_tokens(self) -> int:
        return self.expert_TK.shape[0]

    @property
    def top_k(self) -> int:
        return self.expert_TK.shape[1]

    def check_values(self) -> None:
        """Raises ValueError if a weight is NaN or negative. Waits for the device once."""
        weight_TK = self.weight_TK.detach()
        # min() of anything with a NaN is NaN, so one comparison finds both faults
        if weight_TK.numel() == 0 or weight_TK.min().item() >= 0:
            return
        bad_TK = ~(weight_TK >= 0)
        token, slot = bad_TK.nonzero()[0].tolist()
        first = f"the first at token {token}, slot {slot}: {weight_TK[token, slot].item()}"
        got = f"{int(bad_TK.sum())} bad of {weight_TK.numel()}, {first}"
        remedy = "look for NaN or inf in the router's input, or make the weights with amoeba.routing.router.route"
        raise bad_value("weight_TK", "no NaN and no negative weight", got, remedy)


def route(
    logits_TE: Tensor,
    config: RouterConfig,
    *,
    bias_E: Tensor | None = None,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Routing:
    """Chooses top_k experts for each token and their weights.

    In the result, expert_TK is int64, best first; weight_TK is fp32, or fp64 for fp64 logits.

    bias_E is used for the choice but not for the weights; it is required where config.selection_bias is set, and
    refused elsewhere. In training, config.jitter multiplies the logits by noise; leave generator at None under
    activation checkpointing, which replays only the default generator.

    Slots over the capacity of an expert (config.capacity_factor) get expert id E and weight 0. First choices are
    served before second choices, and among equals the earlier token.

    An expert with a logit of -inf gets no weight. Where a token's scores are undefined (a NaN among its logits, with
    softmax also +inf or nothing but -inf; or a NaN in the bias), its weights are NaN, and so are its output and the
    gradient of its chosen logits. Other tokens are not affected.
    """
    _check_route(logits_TE, config, bias_E)
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if training and config.jitter > 0:
        low, high = 1 - config.jitter, 1 + config.jitter
        logits_TE = logits_TE * torch.empty_like(logits_TE).uniform_(low, high, generator=generator)
    if fused_router.why_not(logits_TE, config) is None:
        chosen_TK, weight_TK, scores_TE = fused_router.fused_route(logits_TE, config, bias_E)
    else:
        scores_TE = _score(logits_TE, config)
        chosen_TK, nan_T1 = _choose(logits_TE.detach(), scores_TE.detach(), config, bias_E)
        weight_TK = _weigh(logits_TE, scores_TE, chosen_TK, nan_T1, config)
    if config.capacity_factor is None:
        return Routing(chosen_TK, weight_TK, logits_TE, scores_TE, trusted=True)

    # a token of NaN keeps its slots: dropped, all of it would come out as zeros
    over_TK = _over_capacity(chosen_TK, config.num_experts, config.capacity_factor) & ~weight_TK.detach().isnan()
    expert_TK = chosen_TK.masked_fill(over_TK, config.num_experts)
    weight_TK = weight_TK.masked_fill(over_TK, 0.0)
    return Routing(expert_TK, weight_TK, logits_TE, scores_TE, trusted=True, chosen_TK=chosen_TK)


def _check_route(logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None) -> None:
    if logits_TE.dim() != 2 or logits_TE.shape[1] != config.num_experts:
        got = f"shape {tuple(logits_TE.shape)}"
        remedy = "flatten the tokens into one dimension, or set num_experts to the router's width"
        raise bad_value("logits_TE", f"shape (tokens, num_experts={config.num_experts})", got, remedy)
    if not logits_TE.dtype.is_floating_point:
        raise bad_value("logits_TE", "a floating dtype", logits_TE.dtype, "convert it with .float()")
    if bias_E is None:
        if config.selection_bias:
            raise bad_value("bias_E", "a tensor, as selection_bias=True", None, "pass bias_E=torch.zeros(num_experts)")
        return
    if not config.selection_bias:
        remedy = "set selection_bias=True in the RouterConfig, or drop the bias"
        raise bad_value("bias_E", "None, as selection_bias=False", f"a tensor of shape {tuple(bias_E.shape)}", remedy)
    if bias_E.shape != (config.num_experts,):
        remedy = "pass one number for each expert"
        raise bad_value("bias_E", f"shape ({config.num_experts},)", f"shape {tuple(bias_E.shape)}", remedy)


def _score(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    match config.score:
        case "sigmoid":
            return logits_TE.sigmoid()
        case "softmax" | "topk_softmax":
            return logits_TE.softmax(dim=-1)
    raise unknown_score(config.score, "route")


def _choose(logits_TE: Tensor, scores_TE: Tensor, config: RouterConfig, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first; and NaN for each token whose choice means nothing, 0 for the others."""
    choice_TE = logits_TE if config.score == "topk_softmax" else scores_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.detach().to(choice_TE.dtype)
    if config.topk_group < config.n_group:
        # masked experts, the lowest of their group, still come before those of other groups
        choice_TE = choice_TE.clamp(min=torch.finfo(choice_TE.dtype).min)
        # -inf and not 0: a bias can make every score of an allowed group negative
        choice_TE = choice_TE.masked_fill(~_in_best_groups(choice_TE, config), -math.inf)
    best_TK, chosen_TK = choice_TE.topk(config.top_k, dim=-1)
    best_T1 = best_TK[:, :1]  # where there is a NaN: topk takes it for the largest number
    return chosen_TK, best_T1.masked_fill(best_T1 == best_T1, 0.0)


def _in_best_groups(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    size = config.num_experts // config.n_group
    choice_TGe = choice_TE.unflatten(1, (config.n_group, size))
    counted = 1 if config.group_score == "max" else min(2, size)
    rank_TG = choice_TGe.topk(counted, dim=-1).values.sum(dim=-1)
    best_group = rank_TG.topk(config.topk_group, dim=-1).indices
    allowed_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(1, best_group, True)
    return allowed_TG.unsqueeze(-1).expand(-1, -1, size).flatten(1)


def _weigh(logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, nan_T1: Tensor, config: RouterConfig) -> Tensor:
    """The weights of the chosen experts.

    Renormalised weights are a softmax over the chosen alone: s_k / Σ s = softmax(log s)_k. Dividing scores
    would give the same weights, but rounding noise where the gradient is exactly 0 (on experts not chosen;
    everywhere for K = 1), and Adam would blow that noise up to full steps. But the logits of those that happen to
    be chosen may be finite where the softmax over all was not, hence nan_T1.
    """
    if config.score == "sigmoid" and config.renormalize:
        log_score_TK = functional.logsigmoid(logits_TE.gather(1, chosen_TK) + nan_T1)
        floor_T1 = log_score_TK.new_full((log_score_TK.shape[0], 1), math.log(DENOMINATOR_FLOOR))
        weight_TK = torch.cat((log_score_TK, floor_T1), dim=1).softmax(dim=1)[:, : config.top_k]
    elif config.score == "topk_softmax" or config.renormalize:
        weight_TK = (logits_TE.gather(1, chosen_TK) + nan_T1).softmax(dim=1)
    else:
        weight_TK = scores_TE.gather(1, chosen_TK) + nan_T1
    return weight_TK * config.scaling_factor if config.scaling_factor != 1.0 else weight_TK


def _over_capacity(chosen_TK: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """True where an expert is full already; experts take all first choices, then all second choices, ..."""
    num_tokens, top_k = chosen_TK.shape
    capacity = math.ceil(capacity_factor * num_tokens * top_k / num_experts)
    chosen_N = chosen_TK.t().flatten()  # slot-major
    order_N = chosen_N.argsort(stable=True)
    sorted_N = chosen_N.gather(0, order_N)
    first_E = torch.searchsorted(sorted_N, torch.arange(num_experts, dtype=chosen_N.dtype, device=chosen_N.device))
    row_N = torch.arange(chosen_N.shape[0], dtype=torch.int64, device=chosen_N.device)
    place_N = row_N - first_E.gather(0, sorted_N)
    over_N = torch.zeros_like(chosen_N, dtype=torch.bool).scatter(0, order_N, place_N >= capacity)
    return over_N.unflatten(0, (top_k, num_tokens)).t()


def load_balance_loss(routing: Routing, num_experts: int, attention_mask: Tensor | None = None) -> Tensor:
    """The load-balancing loss of Switch, E · Σ_e f_e P_e, with f_e = (rows sent to e) / T and P_e e's mean probability.

    Equal to transformers' load_balancing_loss_func; it is top_k when perfectly balanced. Slots that capacity dropped
    count for the expert they were meant for.

    attention_mask: (T,), 0 for the tokens to leave out.
    """
    probability_TE = probabilities(scores_of(routing, num_experts))
    chosen_TK = _choice(routing)
    if attention_mask is None:
        num_tokens: int | Tensor = max(routing.num_tokens, 1)
    else:
        if attention_mask.shape != (routing.num_tokens,):
            got, remedy = f"shape {tuple(attention_mask.shape)}", "flatten it as the tokens were flattened"
            raise bad_value("attention_mask", f"shape ({routing.num_tokens},), one value for each token", got, remedy)
        keep_T1 = (attention_mask != 0).unsqueeze(1)
        probability_TE = probability_TE.masked_fill(~keep_T1, 0.0)
        chosen_TK = chosen_TK.masked_fill(~keep_T1, num_experts)
        num_tokens = keep_T1.sum().clamp(min=1)
    fraction_E = count_rows(chosen_TK.reshape(1, -1), num_experts)[0].to(probability_TE.dtype) / num_tokens
    return num_experts * (fraction_E * probability_TE.sum(dim=0) / num_tokens).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """mean(logsumexp(logits)²), which keeps logits small. 0 for no tokens."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return logits_TE.logsumexp(dim=-1).square().sum() / max(logits_TE.shape[0], 1)


def sequence_balance_loss(routing: Routing, num_experts: int, sequence_length: int) -> Tensor:
    """The loss per sequence of DeepSeek-V3 (eq. 17-20, without α), averaged over sequences; it is 1 when balanced.

    Σ_e f_e P_e with f_e = E / (K·S) · (rows of e in the sequence) and P_e the mean over the sequence of the
    scores divided by their sum. Tokens come sequence by sequence, sequence_length each.
    """
    probability_TE = probabilities(scores_of(routing, num_experts))
    if sequence_length < 1 or routing.num_tokens % sequence_length:
        expected = f"a positive divisor of the number of tokens ({routing.num_tokens})"
        remedy = "pad every sequence to one length, or use load_balance_loss"
        raise bad_value("sequence_length", expected, sequence_length, remedy)
    num_sequences = routing.num_tokens // sequence_length
    slots = sequence_length * routing.top_k
    count_BE = count_rows(_choice(routing).reshape(num_sequences, slots), num_experts).to(probability_TE.dtype)
    mean_BE = probability_TE.unflatten(0, (num_sequences, sequence_length)).mean(dim=1)
    return (count_BE * (num_experts / slots) * mean_BE).sum() / max(num_sequences, 1)


def update_selection_bias_(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Aux-free balancing, in place: experts below the mean load gain `rate`, those above it lose `rate`.

    load_E: rows per expert since the last update, summed over all ranks; counts of any dtype.
    """
    if bias_E.dtype not in (torch.float32, torch.float64):
        remedy = "keep the bias out of .to(dtype): half precision rounds the small steps away"
        raise bad_value("bias_E", "dtype float32 or float64", bias_E.dtype, remedy)
    if bias_E.dim() != 1 or load_E.shape != bias_E.shape:
        got, remedy = f"shape {tuple(load_E.shape)}", "pass the load of all experts, gathered over the ranks"
        raise bad_value("load_E", f"one count for each entry of bias_E, shape {tuple(bias_E.shape)}", got, remedy)
    with torch.no_grad():
        # sum - E·load has the sign of mean - load, and is exact for integers
        direction_E = (load_E.sum() - load_E * load_E.shape[0]).sign()
        return bias_E.add_(direction_E.to(bias_E.dtype), alpha=rate)


def _choice(routing: Routing) -> Tensor:
    return routing.expert_TK if routing.chosen_TK is None else routing.chosen_TK


def scores_of(routing: Routing, num_experts: int) -> Tensor:
    scores_TE = routing.scores_TE
    expected = (routing.num_tokens, num_experts)
    if scores_TE is None or scores_TE.shape != expected:
        got = None if scores_TE is None else f"shape {tuple(scores_TE.shape)}"
        remedy = "make the Routing with amoeba.routing.router.route, and pass its num_experts"
        raise bad_value("scores_TE", f"shape {expected}, (tokens, num_experts)", got, remedy)
    return scores_TE


def probabilities(scores_TE: Tensor) -> Tensor:
    return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + DENOMINATOR_FLOOR)


def count_rows(expert_BN: Tensor, num_experts: int) -> Tensor:
    """Rows per expert in each line, (B, E) int64; ids outside [0, E) are not counted."""
    counted_BN = (expert_BN >= 0) & (expert_BN < num_experts)
    bin_BN = expert_BN.long().masked_fill(~counted_BN, 0)
    count_BE = torch.zeros(expert_BN.shape[0], num_experts, dtype=torch.int64, device=expert_BN.device)
    return count_BE.scatter_add(1, bin_BN, counted_BN.long())
