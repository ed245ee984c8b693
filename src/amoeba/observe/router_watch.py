"""Watches the routers of a Hugging Face model while it trains, without touching it and without waiting for the device.

E experts · T tokens · K experts per token

    watch = RouterWatch(model)      # hooks on every experts module and its router
    loss = loss + 0.02 * watch.take_balance_loss()
    ...train...
    layers = watch.take()           # per layer: load, entropy, max violation, dead experts, drop rate; then starts anew
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amoeba.errors import bad_value
from amoeba.integrations.experts_module import is_experts
from amoeba.lora.targets import ROUTER_NAMES
from amoeba.routing import Routing, RoutingStatistics, load_balance_loss, z_loss
from amoeba.torch_internals import inside_backward


class RouterWatch:
    """Statistics per MoE layer, in the order of the layers."""

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self.statistics: list[RoutingStatistics] = []
        self.coactivation: list[Tensor] = []
        self.selection_biases: list[Tensor | None] = []
        self._logits: dict[int, Tensor] = {}
        # Of the last pass: what the losses are made of, when they are asked for. Made here, inside the forward pass,
        # they would add to what activation checkpointing counts, and it would not find them when it computes again.
        self._routed: list[tuple[Tensor, Tensor, Tensor]] = []  # logits, experts, weights
        self._z_logits: list[Tensor] = []
        self._handles: list[Any] = []
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        for name, module in model.named_modules():
            if _is_experts(module):
                self._watch(name, module, parents.get(module))

    def _watch(self, name: str, experts: Any, parent: nn.Module | None) -> None:
        layer, count = len(self.names), int(experts.num_experts)
        routers = _routers_in(parent)
        # experts that were placed elsewhere leave a shape behind; their router is where x is
        device = next((p.device for router in routers for p in router.parameters()), experts.down_proj.device)
        self.names.append(name)
        self.statistics.append(RoutingStatistics(count, device))
        self.coactivation.append(torch.zeros(count, count, dtype=torch.float32, device=device))

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not module.training or inside_backward():
                return
            found = [*args, *kwargs.values()]
            expert_TK, weight_TK = found[1].detach(), found[2].detach()
            logits_TE = self._logits.pop(layer, None)
            scores_TE = None if logits_TE is None else logits_TE.detach().float().softmax(-1)
            self.statistics[layer].record(Routing(expert_TK, weight_TK, scores_TE=scores_TE, trusted=True))
            if logits_TE is not None and logits_TE.requires_grad:
                self._routed.append((logits_TE, expert_TK, weight_TK))
            chosen_TE = torch.zeros(expert_TK.shape[0], count + 1, dtype=torch.float32, device=device)
            chosen_TE.scatter_(1, expert_TK.clamp(0, count), 1.0)
            self.coactivation[layer] += chosen_TE[:, :count].T @ chosen_TE[:, :count]

        def keep_logits(module: nn.Module, args: tuple, output: Any) -> None:
            logits = _logits_of(output)
            if inside_backward():
                return
            if isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == count and module.training:
                self._logits[layer] = logits
                if logits.requires_grad:
                    self._z_logits.append(logits)

        self._handles.append(experts.register_forward_pre_hook(record, with_kwargs=True))
        self.selection_biases.append(None)
        for router in routers:
            self._handles.append(router.register_forward_hook(keep_logits))
            self.selection_biases[layer] = getattr(router, "e_score_correction_bias", None)

    @property
    def has_routers(self) -> bool:
        return len(self._handles) > len(self.names)  # one of each layer's experts, and those of the routers

    def must_have(self, loss: Tensor | None) -> Tensor:
        """A loss that was asked for; ValueError where no router gave the logits that it is made of."""
        if loss is not None:
            return loss
        raise bad_value(
            "balance",
            f"routers beside the experts ({' or '.join(ROUTER_NAMES)}) with logits, one for each expert, to train",
            f"none at {', '.join(self.names[:2])}{' and others' if len(self.names) > 2 else ''}",
            "use balance none and a z-loss coefficient of 0, train the routers, or take another architecture",
        )

    def take_balance_loss(self) -> Tensor | None:
        """The Switch loss of the last pass, averaged over the layers; None where no router was seen.

        Each layer is balanced by itself. transformers' own loss adds the layers up first, so that an idle expert of one
        layer is made good by a busy one of another.
        """
        routed, self._routed = self._routed, []
        losses = []
        for logits_TE, expert_TK, weight_TK in routed:
            scores_TE = logits_TE.float().softmax(-1)
            routing = Routing(expert_TK, weight_TK, scores_TE=scores_TE, trusted=True)
            losses.append(load_balance_loss(routing, logits_TE.shape[1]))
        return torch.stack(losses).mean() if losses else None

    def take_z_loss(self) -> Tensor | None:
        """The z-loss of the last pass, averaged over the layers."""
        logits, self._z_logits = self._z_logits, []
        return torch.stack([z_loss(logits_TE) for logits_TE in logits]).mean() if logits else None

    def take(self) -> list[dict[str, Any]]:
        """The statistics since the last call, as plain numbers (this waits for the device)."""
        layers = []
        for layer, statistics in enumerate(self.statistics):
            summary = statistics.summary()
            entropy = summary["entropy"].item()
            layers.append(
                {
                    "layer": layer,
                    "load": summary["load_E"].tolist(),
                    "entropy": None if entropy != entropy else entropy,
                    "max_violation": summary["max_violation"].item(),
                    "dead_experts": int(summary["dead_experts"].item()),
                    "drop_rate": summary["drop_rate"].item(),
                }
            )
            statistics.reset()
        return layers

    def take_coactivation(self) -> list[dict[str, Any]]:
        return [{"layer": layer, "counts": counts.tolist()} for layer, counts in enumerate(self.coactivation)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def check_balance(model: nn.Module, balance: str, z_loss_coefficient: float) -> None:
    """ValueError where nothing in the model would be balanced so. What a router returns is seen when it is called."""
    watch = RouterWatch(model)
    watch.close()
    if balance == "bias" and all(bias is None for bias in watch.selection_biases):
        raise bad_value(
            "balance",
            "aux or none, since the routers of this model have no selection bias (e_score_correction_bias)",
            "'bias'",
            "use --balance aux, or an architecture that has one, such as deepseek_v3 or glm4_moe",
        )
    if (balance == "aux" or z_loss_coefficient) and not watch.has_routers:
        watch.must_have(None)


def _is_experts(module: Any) -> bool:
    """Those that transformers hands over: they are called with the experts and weights that the router chose."""
    return is_experts(module) and hasattr(module, "num_experts")


def _logits_of(output: Any) -> Any:
    """Of what a router returns: they come first, or last after the ids (granitemoe in transformers 5.17)."""
    if not isinstance(output, tuple):
        return output
    first = output[0]
    return output[-1] if isinstance(first, Tensor) and not first.is_floating_point() else first


def _routers_in(block: nn.Module | None) -> list[nn.Module]:
    beside = [getattr(block, child, None) for child in ROUTER_NAMES]
    return [router for router in beside if isinstance(router, nn.Module)]
