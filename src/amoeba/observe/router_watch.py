"""Watches the routers of a Hugging Face model while it trains, and pulls them towards even loads.

E experts · T tokens · K experts per token

    watch = RouterWatch(model)      # every experts module and its router
    watch.balance(0.01, 0.0)        # coefficients of the load-balancing loss and the z-loss
    layers = watch.take()           # per layer: load, entropy, max violation, dead experts, drop rate; then starts anew

Numbers stay on the device until they are taken. The gradients of the two losses join the router's own in backward (see
`amoeba.routing.balance`). Watched modules change their class for a subclass of it: one for all layers of a kind, so
that what torch.compile makes of one layer serves the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import ROUTER_NAMES, is_experts, routers_in
from amoeba.routing.balance import ENTROPY_UNIT, Ledger, attach_balance, count_choices


class RouterWatch:
    """Statistics per MoE layer, in the order of the layers."""

    def __init__(self, model: nn.Module) -> None:
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        modules = ((name, module) for name, module in model.named_modules() if is_experts(module))
        found = [(name, module) for name, module in modules if hasattr(module, "num_experts")]
        self.names = [name for name, _ in found]
        self.experts: list[Any] = [module for _, module in found]
        self.routers = [routers_in(parents.get(module)) for module in self.experts]
        biases = ([getattr(each, "e_score_correction_bias", None) for each in routers] for routers in self.routers)
        self.selection_biases = [next((bias for bias in each if bias is not None), None) for each in biases]
        self.ledger = Ledger([int(module.num_experts) for module in self.experts], self._device())
        for layer, (module, routers) in enumerate(zip(self.experts, self.routers, strict=True)):
            _watch(module, _WatchedExperts, self.ledger.key(layer), self.ledger.experts[layer])
            for router in routers:
                _watch(router, _WatchedRouter, self.ledger.key(layer), self.ledger.experts[layer])

    def _device(self) -> torch.device | None:
        """Of the routers: experts that were placed elsewhere leave a shape behind, and their router is where x is."""
        routers = [p.device for routers in self.routers for router in routers for p in router.parameters()]
        return next(iter([*routers, *(module.down_proj.device for module in self.experts)]), None)

    def share(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Several processes have a part of each batch: what is taken from now on is of them all, and so is balance."""
        self.ledger.add_up = add_up

    def loads(self) -> Tensor:
        """Of the layers' experts since the last `take`, and behind the last one what none of them served."""
        return self._of_all(self.ledger.load_LE)

    def _of_all(self, counts: Tensor) -> Tensor:
        return counts.clone() if self.ledger.add_up is None else self.ledger.add_up(counts)

    @property
    def has_routers(self) -> bool:
        return any(self.routers)

    def balance(self, coefficient: float, z_coefficient: float) -> None:
        """Of the mean over the layers of the load-balancing loss and of the z-loss.

        Each layer is balanced by itself. transformers' own loss adds the layers up first, so that an idle expert of one
        layer is made good by a busy one of another.
        """
        layers = max(len(self.names), 1)
        self.ledger.pull, self.ledger.z_pull = coefficient / layers, z_coefficient / layers

    def check_balanced(self) -> None:
        """After a pass with gradients: ValueError where a loss was asked for and no router gave the logits for it."""
        asked = self.ledger.pull or self.ledger.z_pull
        if asked and not self.ledger.pulled:
            self.refuse()

    def refuse(self) -> None:
        where = f"routers next to the experts ({' or '.join(ROUTER_NAMES)})"
        got = f"none at {', '.join(self.names[:2])}{' and others' if len(self.names) > 2 else ''}"
        remedy = "use balance none and a z-loss coefficient of 0, train the routers, or take another architecture"
        raise bad_value("balance", f"{where} with logits, one for each expert, to train", got, remedy)

    def take(self) -> list[dict[str, Any]]:
        """The statistics since the last call, as plain numbers (this waits for the device)."""
        ledger = self.ledger
        layers = []
        for layer, (counts, entropy) in enumerate(
            zip(self.loads().tolist(), self._of_all(ledger.entropy_L2).tolist(), strict=True)
        ):
            load, dropped, (tokens, units) = counts[: ledger.experts[layer]], counts[ledger.experts[layer]], entropy
            found = {"layer": layer, "load": load, "entropy": units * ENTROPY_UNIT / tokens if tokens else None}
            found["max_violation"] = max(load) * len(load) / sum(load) - 1 if sum(load) else 0.0
            found |= {"dead_experts": load.count(0), "drop_rate": dropped / max(sum(load) + dropped, 1)}
            layers.append(found)
        ledger.reset()
        return layers

    def forget(self) -> None:
        self.ledger.reset()
        self.ledger.together_LEE.zero_()

    def take_coactivation(self) -> list[dict[str, Any]]:
        """How often two experts served one token, among the first tokens of each pass."""
        counts = zip(self._of_all(self.ledger.together_LEE).tolist(), self.ledger.experts, strict=True)
        squares = ([row[:experts] for row in rows[:experts]] for rows, experts in counts)
        return [{"layer": layer, "counts": square} for layer, square in enumerate(squares)]

    @contextmanager
    def counting(self, wanted_T: Tensor) -> Iterator[list[Tensor]]:
        """The rows that each layer's experts get inside (E, one tensor a layer) from the tokens that are wanted."""
        loads = [torch.zeros(experts, dtype=torch.int64, device="cpu") for experts in self.ledger.experts]

        def count(layer: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            expert_TK = named["top_k_index"] if "top_k_index" in named else arguments[1]
            chosen = expert_TK.reshape(len(wanted_T), -1)[wanted_T.to(expert_TK.device)].flatten().cpu()
            chosen = chosen[(chosen >= 0) & (chosen < len(loads[layer]))]
            loads[layer] += torch.bincount(chosen.long(), minlength=len(loads[layer]))

        hooks = [
            module.register_forward_pre_hook(
                lambda _, arguments, named, layer=layer: count(layer, arguments, named), with_kwargs=True
            )
            for layer, module in enumerate(self.experts)
        ]
        try:
            yield loads
        finally:
            for hook in hooks:
                hook.remove()

    def close(self) -> None:
        for module in [*self.experts, *(router for routers in self.routers for router in routers)]:
            if isinstance(module, _WatchedExperts | _WatchedRouter):
                module.__class__ = module.own_class
                del module.amoeba_key


class _WatchedExperts:
    training: bool
    own_class: type
    amoeba_key: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.training:
            top_k_weights = count_choices(top_k_weights, top_k_index, self.amoeba_key)
        return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]


class _WatchedRouter:
    training: bool
    own_class: type
    amoeba_key: Tensor
    amoeba_experts: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        logits = _logits_of(output)
        is_logits = isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == self.amoeba_experts
        if not self.training or not is_logits:
            return output
        if not isinstance(output, tuple):
            return attach_balance(logits, logits, self.amoeba_key)
        # the routing weights, which the loss depends on; the logits are only for observers
        place = next((i for i, item in enumerate(output) if item is not logits and item.is_floating_point()), None)
        if place is None:
            return output
        carrier = attach_balance(output[place], logits, self.amoeba_key)
        return (*output[:place], carrier, *output[place + 1 :])


@functools.cache
def _watched(mixin: type, own: type) -> type:
    return type(own.__name__, (mixin, own), {"own_class": own, "__module__": own.__module__})


def _watch(module: Any, mixin: Any, key: Tensor, experts: int) -> None:
    own: Any = module.own_class if isinstance(module, mixin) else type(module)  # the last to watch is told
    module.__class__ = _watched(mixin, own)
    module.__dict__["amoeba_key"], module.__dict__["amoeba_experts"] = key, experts


def check_balance(model: nn.Module, balance: str, z_loss_coefficient: float) -> None:
    """ValueError where nothing in the model would be balanced so. What a router returns is seen when it is called."""
    watch = RouterWatch(model)
    watch.close()
    if balance == "bias" and all(bias is None for bias in watch.selection_biases):
        expected = "aux or none, since the routers of this model have no selection bias (e_score_correction_bias)"
        remedy = "use --balance aux, or an architecture that has one, such as deepseek_v3 or glm4_moe"
        raise bad_value("balance", expected, "'bias'", remedy)
    if (balance == "aux" or z_loss_coefficient) and not watch.has_routers:
        watch.refuse()


def _logits_of(output: Any) -> Any:
    """Of what a router returns: they come first, or last after the ids (granitemoe in transformers 5.17)."""
    if not isinstance(output, tuple):
        return output
    first = output[0]
    return output[-1] if isinstance(first, Tensor) and not first.is_floating_point() else first
