"""The sizes, activation and router of a mixture-of-experts layer. Frozen and validated.

    config = MoEConfig(hidden_size=512, intermediate_size=256, router=RouterConfig(num_experts=32, top_k=4))

A bad value raises ValueError at construction, with the field's name, what was expected, what came and what to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from amoeba.core.errors import BadValue, bad_value

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ScoreFunction = Literal["softmax", "sigmoid", "topk_softmax"]
GroupScore = Literal["top2_sum", "max"]
# DeepSeek-V3 in transformers divides sigmoid scores by their sum plus this.
DENOMINATOR_FLOOR = 1e-20


def unknown_kind(kind: str, where: str) -> BadValue:
    """For code that computes some kinds of activation: another one must not be taken for one of them."""
    return bad_value(
        "activation.kind", f"one that {where} computes", repr(kind), "add it there, or choose another kind"
    )


def unknown_score(score: str, where: str) -> BadValue:
    return bad_value("score", f"one that {where} computes", repr(score), "add it there, or choose another score")


@dataclass(frozen=True)
class Activation:
    """What an expert computes between its two projections.

    kind:        the function act: silu, gelu, gelu_tanh, relu, or relu2 (relu squared).
    gated:       a = act(gate) * (up + up_shift), where h holds gate and up; otherwise a = act(h).
    alpha:       the slope inside silu, g * sigmoid(alpha * g).
    limit:       clamps gate to (-inf, limit] and up to [-limit, limit] before the activation; inf clamps nothing.
                 An ungated h is clamped like a gate.
    up_shift:    added to up before it is multiplied with the gate.
    interleaved: h holds gate0, up0, gate1, up1, ... instead of all gates and then all ups.

    gpt-oss is Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True).
    """

    kind: ActivationKind = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    up_shift: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        _one_of("activation.kind", self.kind, get_args(ActivationKind))
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise bad_value("activation.alpha", "a finite number above 0", self.alpha, "use 1.0 for plain silu")
        if self.alpha != 1.0 and self.kind != "silu":
            raise bad_value("activation.alpha", f"1.0 for {self.kind}", self.alpha, "only silu has a slope")
        if not self.limit > 0:
            raise bad_value("activation.limit", "a number above 0", self.limit, "use math.inf for no clamp")
        if not math.isfinite(self.up_shift):
            raise bad_value("activation.up_shift", "a finite number", self.up_shift, "use 0.0 for none")
        if not self.gated and (self.interleaved or self.up_shift != 0.0):
            raise bad_value(
                "activation.gated",
                "True if interleaved or up_shift is set",
                self.gated,
                "an ungated expert has no up half: leave both at their defaults",
            )

    def __str__(self) -> str:
        words = [
            self.kind,
            "gated" if self.gated else "plain",
            "clamped" if math.isfinite(self.limit) else "",
            "interleaved" if self.interleaved else "",
            f"alpha={self.alpha}" if self.alpha != 1.0 else "",
            f"up_shift={self.up_shift}" if self.up_shift else "",
        ]
        return " ".join(word for word in words if word)

    def width(self, intermediate: int) -> int:
        """J, the number of rows of gate_up for this I."""
        return 2 * intermediate if self.gated else intermediate


@dataclass(frozen=True)
class RouterConfig:
    """How the router turns logits into experts and weights.

    num_experts:     E, the number of experts.
    top_k:           K, the number of experts per token.
    score:           softmax over all experts, then top-k; sigmoid per expert, then top-k; or top-k of the logits,
                     then softmax over the chosen ("topk_softmax").
    renormalize:     divide the chosen weights by their sum (softmax and sigmoid).
    scaling_factor:  multiplies the weights at the end.
    n_group, topk_group: choose experts only from the best topk_group of n_group equal groups.
    group_score:     what ranks a group: the sum of its two best experts (DeepSeek-V3) or its best (DeepSeek-V2).
    selection_bias:  a bias per expert that is used for the choice but not for the weight (aux-free balancing).
    jitter:          in training, logits are multiplied by uniform noise in [1 - jitter, 1 + jitter].
    capacity_factor: an expert takes at most ceil(capacity_factor * T * K / E) rows, the rest are dropped;
                     None, the default, drops nothing.
    """

    num_experts: int
    top_k: int
    score: ScoreFunction = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "top2_sum"
    selection_bias: bool = False
    jitter: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        _positive("num_experts", self.num_experts)
        _positive("top_k", self.top_k)
        if self.top_k > self.num_experts:
            raise bad_value(
                "top_k", f"at most num_experts ({self.num_experts})", self.top_k, "lower top_k or add experts"
            )
        _one_of("score", self.score, get_args(ScoreFunction))
        _one_of("group_score", self.group_score, get_args(GroupScore))
        if not (math.isfinite(self.scaling_factor) and self.scaling_factor > 0):
            raise bad_value("scaling_factor", "a finite number above 0", self.scaling_factor, "use 1.0 for no scaling")
        _positive("n_group", self.n_group)
        _positive("topk_group", self.topk_group)
        if self.num_experts % self.n_group:
            raise bad_value(
                "n_group",
                f"a divisor of num_experts ({self.num_experts})",
                self.n_group,
                "groups must be of equal size: choose another n_group, or 1 for no groups",
            )
        if self.topk_group > self.n_group:
            raise bad_value("topk_group", f"at most n_group ({self.n_group})", self.topk_group, "lower topk_group")
        reachable = self.topk_group * (self.num_experts // self.n_group)
        if self.top_k > reachable:
            raise bad_value(
                "top_k",
                f"at most the {reachable} experts that topk_group={self.topk_group} groups hold",
                self.top_k,
                "raise topk_group or lower top_k",
            )
        if not 0.0 <= self.jitter < 1.0:
            raise bad_value("jitter", "0 <= jitter < 1", self.jitter, "use 0.0 for no noise, 0.01 is customary")
        if self.capacity_factor is not None and not (math.isfinite(self.capacity_factor) and self.capacity_factor > 0):
            raise bad_value(
                "capacity_factor",
                "None or a finite number above 0",
                self.capacity_factor,
                "use None for dropless",
            )


@dataclass(frozen=True)
class MoEConfig:
    """A whole layer: router, routed experts, and shared experts, which see every token.

    hidden_size:              H.
    intermediate_size:        I of each routed expert.
    router:                   how experts are chosen.
    activation:               of the routed experts; the shared experts are silu-gated.
    bias:                     whether both projections of the routed experts have a bias.
    shared_intermediate_size: I of all shared experts together; 0 for none.
    """

    hidden_size: int
    intermediate_size: int
    router: RouterConfig
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        _positive("hidden_size", self.hidden_size)
        _positive("intermediate_size", self.intermediate_size)
        if not isinstance(self.shared_intermediate_size, int) or self.shared_intermediate_size < 0:
            raise bad_value(
                "shared_intermediate_size",
                "an integer of at least 0",
                self.shared_intermediate_size,
                "use 0 for no shared experts",
            )
        for name, kind in (("router", RouterConfig), ("activation", Activation)):
            if not isinstance(getattr(self, name), kind):
                raise bad_value(
                    name, f"a {kind.__name__}", repr(getattr(self, name)), f"pass {name}={kind.__name__}(...)"
                )


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_value(name, "an integer of at least 1", repr(value), f"set {name} to a positive integer")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise bad_value(name, f"one of {', '.join(allowed)}", repr(value), f"set {name} to one of these")
