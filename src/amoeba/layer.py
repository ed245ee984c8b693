"""A whole mixture-of-experts layer, for use without a Hugging Face model: router, experts, shared experts.

T tokens · E experts · H hidden · I intermediate · J = 2I (gated: gate and up) or I

    layer = MoE(MoEConfig(hidden_size=512, intermediate_size=256, router=RouterConfig(num_experts=32, top_k=4)))
    y, routing = layer(x, return_routing=True)                      # x and y: (..., 512)
    loss = loss + 0.01 * load_balance_loss(routing, num_experts=32)
    layer.update_balance(rate=0.001)                                # with RouterConfig(selection_bias=True), each step

Parameters have transformers' names and shapes, so the state dict of a Qwen3-MoE, Mixtral or DeepSeek-V3 block loads
as it is. Router logits are computed in fp32 (fp64 for fp64) whatever x is, under autocast too, as DeepSeek-V3's router
in transformers does; those of Qwen3-MoE and Mixtral round them to the dtype of x, so in half precision a near tie may
fall to another expert here than there.

Built on the meta device, a layer is filled by load_state_dict(assign=True), or by to_empty() and then
reset_parameters() or load_state_dict().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amoeba.core.config import MoEConfig, RouterConfig
from amoeba.core.errors import bad_value
from amoeba.core.operators import reverse_only
from amoeba.core.torch_internals import reshaped, transformed
from amoeba.core.weights import ExpertWeights
from amoeba.experts import experts
from amoeba.precision.recipes import UNCHANGED, Precision, check_precision, with_precision
from amoeba.routing.router import Routing, route, update_selection_bias_
from amoeba.routing.statistics import RoutingStatistics

INITIAL_STD = 0.02


class MoE(nn.Module):
    """A mixture-of-experts layer: y = Σ_k weight_k · expert_k(x) + shared_experts(x).

    backend, recompute: as in `amoeba.experts`.
    precision: in which the experts train: "fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4", "auto"
    (see `amoeba.precision.recipes`), or "bf16" for their own dtype, whatever it is.

    The attribute `statistics` records what the router does in training (see `RoutingStatistics`); it is not part of
    the state dict, which has transformers' names:

        gate.weight (E, H)                            gate.e_score_correction_bias (E), with selection_bias
        experts.gate_up_proj (E, J, H)                experts.gate_up_proj_bias (E, J), with bias
        experts.down_proj (E, H, I)                   experts.down_proj_bias (E, H), with bias
        shared_experts.{gate,up,down}_proj.weight     with shared_intermediate_size

    Ungated experts have up_proj and up_proj_bias in place of gate_up_proj and gate_up_proj_bias.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        backend: str = "auto",
        recompute: bool = False,
        precision: Precision = UNCHANGED,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, shared = config.hidden_size, config.shared_intermediate_size
        self.gate = Router(hidden, config.router, device, dtype)
        self.experts = Experts(config, backend, recompute, device, dtype, precision)
        self.shared_experts = SharedExperts(hidden, shared, device, dtype) if shared else None
        self.statistics = RoutingStatistics(config.router.num_experts, device)
        self.register_load_state_dict_post_hook(_bring_statistics_along)

    def forward(self, x: Tensor, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """x (..., H) -> y (..., H); with return_routing also the Routing of the flattened tokens, for the losses."""
        hidden = self.config.hidden_size
        if x.dim() == 0 or x.shape[-1] != hidden:
            raise bad_value(
                "x",
                f"a last dimension of hidden_size ({hidden})",
                f"shape {tuple(x.shape)}",
                "pass hidden states as (..., hidden_size), or build the layer with their size",
            )
        x_TH = x.reshape(-1, hidden)
        routing = self.gate(x_TH)
        if self.training:
            self.statistics.record(routing)
        y_TH = self.experts(x_TH, routing)
        if self.shared_experts is not None:
            y_TH = y_TH + self.shared_experts(x_TH)
        # No view: FSDP2 loses its hook on one that something is added to in place.
        y = y_TH if x.dim() == 2 else reshaped(y_TH, x.shape)
        return (y, routing) if return_routing else y

    def update_balance(self, rate: float) -> None:
        """Aux-free balancing: moves the selection bias against the load recorded since the last call, then resets it.

        Call it once per optimizer step, after reading statistics.summary() if you want it. Under data parallelism sum
        the load first, or the ranks drift apart: torch.distributed.all_reduce(statistics.load_E).
        """
        bias_E = self.gate.e_score_correction_bias
        if bias_E is None:
            raise bad_value(
                "update_balance",
                "a router with a selection bias",
                "selection_bias=False",
                "build the layer with RouterConfig(selection_bias=True), or add load_balance_loss to the loss",
            )
        update_selection_bias_(bias_E, self.statistics.load_E, rate)
        self.statistics.reset()

    def reset_parameters(self) -> None:
        """Draws all weights again, as at construction; biases become 0 and the statistics are reset."""
        self.gate.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters()
        self.statistics.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        from_meta = self.statistics.load_E.is_meta
        super()._apply(fn, recurse)
        if from_meta and not self.statistics.load_E.is_meta:
            self.statistics.reset()  # to_empty() counts from whatever was in memory
        return self

    def extra_repr(self) -> str:
        config, router = self.config, self.config.router
        sizes = [f"hidden_size={config.hidden_size}", f"intermediate_size={config.intermediate_size}"]
        if config.shared_intermediate_size:
            sizes.append(f"shared_intermediate_size={config.shared_intermediate_size}")
        return ", ".join((*sizes, f"num_experts={router.num_experts}", f"top_k={router.top_k}"))


class Router(nn.Module):
    """x_TH -> Routing. The selection bias, used only for the choice, stays in fp32 (or fp64) through every cast."""

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        config: RouterConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden, device=device, dtype=dtype))
        bias_E = torch.empty(config.num_experts, device=device, dtype=_at_least_fp32(self.weight.dtype))
        self.register_buffer("e_score_correction_bias", bias_E if config.selection_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x_TH: Tensor) -> Routing:
        # torch.compile takes no function that says anything about forward mode
        linear = _Refusing if transformed() else _WideLinear
        logits_TE = linear.apply(x_TH, self.weight)
        return route(logits_TE, self.config, bias_E=self.e_score_correction_bias, training=self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before_E = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after_E = self.e_score_correction_bias
        if before_E is not None and after_E is not None and after_E.dtype != _at_least_fp32(after_E.dtype):
            # from the value before the cast: steps of 0.001 are lost in half precision
            self.e_score_correction_bias = before_E.to(after_E.device, torch.float32)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        bias_E = self.e_score_correction_bias
        if bias_E is not None:  # assign=True takes the dtype of the checkpoint
            self.e_score_correction_bias = bias_E.to(_at_least_fp32(bias_E.dtype))

    def extra_repr(self) -> str:
        config = self.config
        return f"num_experts={config.num_experts}, top_k={config.top_k}, score={config.score!r}"


class Experts(nn.Module):
    """(x_TH, Routing) -> y_TH: the parameters of the routed experts, computed by `amoeba.experts`."""

    def __init__(
        self,
        config: MoEConfig,
        backend: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        precision: Precision = UNCHANGED,
    ) -> None:
        super().__init__()
        check_precision(precision)
        self.activation = config.activation
        self.backend = backend
        self.recompute = recompute
        self.precision = precision
        num_experts, hidden, intermediate = config.router.num_experts, config.hidden_size, config.intermediate_size
        width = config.activation.width(intermediate)
        first = "gate_up_proj" if config.activation.gated else "up_proj"
        shapes: dict[str, tuple[int, ...]] = {
            first: (num_experts, width, hidden),
            "down_proj": (num_experts, hidden, intermediate),
            f"{first}_bias": (num_experts, width),
            "down_proj_bias": (num_experts, hidden),
        }
        self._names = tuple(shapes)  # in the order of ExpertWeights
        for name, shape in shapes.items():
            wanted = config.bias or not name.endswith("_bias")
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def weights(self) -> ExpertWeights:
        """The parameters as the backends take them, without a copy."""
        gate_up, down, gate_up_bias, down_bias = (getattr(self, name) for name in self._names)
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias, self.activation)
        return weights if self.precision == UNCHANGED else with_precision(weights, self.precision)

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        return experts(x_TH, routing, self.weights(), backend=self.backend, recompute=self.recompute)

    def extra_repr(self) -> str:
        precision = "" if self.precision == UNCHANGED else f", precision={self.precision!r}"
        return f"{self.activation}, backend={self.backend!r}, recompute={self.recompute}{precision}"


class SharedExperts(nn.Module):
    """The experts that see every token: one silu-gated MLP, as wide as all shared experts together."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.up_proj = Projection(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.down_proj = Projection(intermediate, hidden, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        for projection in (self.gate_proj, self.up_proj, self.down_proj):
            projection.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Projection(nn.Linear):
    """nn.Linear, drawn like the other weights of the layer."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class _WideLinear(torch.autograd.Function):
    """x @ weightᵀ in fp32 or wider. Keeps x itself between the passes, where autograd would keep an fp32 copy."""

    @staticmethod
    def forward(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        wide = _at_least_fp32(torch.promote_types(x_TH.dtype, weight_EH.dtype))
        with torch.autocast(x_TH.device.type, enabled=False):
            return functional.linear(x_TH.to(wide), weight_EH.to(wide))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        wide, dx_TH, dweight_EH = dlogits_TE.dtype, None, None
        with torch.autocast(x_TH.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx_TH = (dlogits_TE @ weight_EH.to(wide)).to(x_TH.dtype)
            if ctx.needs_input_grad[1]:
                dweight_EH = (dlogits_TE.t() @ x_TH.to(wide)).to(weight_EH.dtype)
        return dx_TH, dweight_EH


class _Refusing(reverse_only("amoeba.MoE"), _WideLinear):  # type: ignore[misc]
    """The same under a transform of torch.func."""


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _bring_statistics_along(layer: MoE, _incompatible_keys: Any) -> None:
    """load_state_dict(assign=True) leaves behind on the meta device what no state dict holds."""
    device = layer.gate.weight.device
    if layer.statistics.load_E.is_meta and device.type != "meta":
        layer.statistics.to_empty(device=device)
        layer.statistics.reset()
