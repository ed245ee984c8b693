"""The C++ core's steps in exact mode (csrc/step_exact.cpp), for what `cpu_step` knows, with the bits of training.

    native = read_exactly(model)        # NativeModel, or raises `Unknown` with the reason

A model has to be of parts whose operators step_exact.cpp repeats one by one. Whether it does is then tried: for a few
random tokens each layer, the keys, the values and the logits have to be those of the exact forward pass, to the last
bit. What is not keeps transformers' loop, which is exact, too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amoeba.backends import read_quantised
from amoeba.core.config import Activation
from amoeba.core.weights import AnyExperts, ExpertWeights, LoraFactors
from amoeba.cpu import step as core
from amoeba.cpu.node_library import activation_number
from amoeba.cpu.weights import Path as CpuPath
from amoeba.cpu.weights import current_path
from amoeba.decoding.model_reader import ModelReader, NativeModel, Unknown, hidden_states, is_adapted, keys_and_values
from amoeba.integrations.experts_module import routers_in, weights_of
from amoeba.ops.exact import ExactOperators
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.system.cpu_features import compute_dtype

_ROWS, _TOKENS = 2, 8  # of the trial
_ROUTED = 64  # tokens by which a router is known


def read_exactly(model: Any) -> NativeModel:
    if model.dtype == torch.bfloat16 and current_path() is CpuPath.AMX:
        raise Unknown("exact mode multiplies bf16 by AMX tiles, and the step does not")
    native = _ExactReader(model).read()
    seen = hidden_states(model, _trial_tokens(native))
    caches = keys_and_values(model, _trial_tokens(native))
    reason: Unknown | None = None
    for native.rotation, flags in itertools.product(("halves", "pairs"), _roundings(model)):
        native.exact = dict(zip(core.EXACT_FLAGS, flags, strict=True))
        try:
            _compare(native, seen, caches)
        except Unknown as other:
            reason = reason or other
        else:
            return native
    assert reason is not None
    raise reason


def _roundings(model: Any) -> Iterator[tuple[bool, ...]]:
    """What each of `EXACT_FLAGS` may be."""
    half = model.dtype == torch.bfloat16
    choices = (True, False) if half else (False,)
    experts = half and compute_dtype(torch.bfloat16, model.device) == torch.bfloat16
    for first, logits, routing in itertools.product(choices, repeat=3):
        yield half, first, logits, routing, experts


class _ExactReader(ModelReader):
    """Weights in their own numbers, factors apart from them."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, "auto")

    def read(self) -> NativeModel:
        native = super().read()
        if native.is_latent:
            raise Unknown("exact mode computes latent attention from keys and values of each head")
        for layer in native.layers:
            if layer.shared_gate or layer.clip != float("inf"):
                raise Unknown("it has gated shared experts, or clips queries and keys")
            for experts in (layer.experts, layer.shared):
                if experts.down.data and not (experts.gated and experts.kind == activation_number("silu")):
                    raise Unknown("its activation is not gated by silu")
        if native.logits_scale != 1.0 or native.streamed:
            raise Unknown("it scales its logits, or streams its experts")
        return native

    def _experts(self, module: Any, index: int) -> core.CStepExperts:
        weights: AnyExperts | None = weights_of(module)
        for parameter in module.parameters():
            self._parameter(parameter)
        stored: list[Any]
        if isinstance(weights, QuantisedExperts):
            if (reason := read_quantised.why_not(weights)) is not None:
                raise Unknown(reason)
            stored = [read_quantised.scaled_codes(each) for each in (weights.gate_up_EJH, weights.down_EHI)]
        elif isinstance(weights, ExpertWeights):
            stored = [each.detach() for each in (weights.gate_up_EJH, weights.down_EHI)]
            if any(1 not in each.stride()[1:] for each in stored):
                raise Unknown("its experts are contiguous along no dimension")
        else:
            raise Unknown(f"its experts are {getattr(weights, 'placement', 'computed by their own functions')}")
        return self._expert_matrices(module, weights, stored, [weights.gate_up_bias_EJ, weights.down_bias_EH])

    def _adapt(
        self, gate_up: core.CStepMatrix, down: core.CStepMatrix, factors: LoraFactors, activation: Activation
    ) -> None:
        """Each factor in the dtype of the model, as `prepared` rounds them."""
        found = {name: each.detach().to(self.model.dtype) for name, each in factors.tensors().items()}
        both = [(found.get(f"{part}_lora_a"), found.get(f"{part}_lora_b")) for part in ("gate", "up")]
        (gate_a, gate_b), (up_a, up_b) = both
        if gate_a is not None or up_a is not None:
            if gate_a is None or up_a is None or gate_b is None or up_b is None or gate_a.shape != up_a.shape:
                raise Unknown("its LoRA factors of gate and up have different ranks")
            a_ERH, parts = (gate_a, 1) if torch.equal(gate_a, up_a) else (torch.cat((gate_a, up_a), 1), 2)
            if activation.interleaved:
                b_EJR = torch.stack((gate_b, up_b), 2).flatten(1, 2)
            else:
                b_EJR = torch.cat((gate_b, up_b), 1)
            core.adapt_exactly(gate_up, a_ERH, b_EJR, factors.scaling, self.kept, parts=parts, half=False)
        if (a_ERI := found.get("down_lora_a")) is not None:
            b_EHR, scaling = found["down_lora_b"], factors.scaling
            core.adapt_exactly(down, a_ERI, b_EHR, scaling, self.kept, parts=1, half=False)

    def _mlp(self, mlp: Any) -> core.CStepExperts:
        if any(hasattr(each, "lora_A") for each in mlp.modules()):
            raise Unknown("its dense or shared experts have LoRA factors")
        return super()._mlp(mlp)

    def _linear(self, linear: Any) -> core.CStepMatrix:
        plain, _ = self._plain_linear(linear)
        c = core.matrix("linear", self._dense([linear]), self._bias(plain.bias), self.kept)
        names = self._adapters(linear) if is_adapted(linear) else []
        if len(names) > 1:
            raise Unknown("several adapters are active at once")
        for name in names:
            a_RI, b_OR = linear.lora_A[name].weight, linear.lora_B[name].weight
            half, scaling = a_RI.dtype == torch.bfloat16, linear.scaling[name]
            core.adapt_exactly(c, a_RI[None], b_OR[None], scaling, self.kept, parts=0, half=half)
        return c

    def _router(self, block: Any) -> core.CStepRouter:
        if any(hasattr(each, "lora_A") for each in block.children()):
            raise Unknown("its router has LoRA factors")
        c = super()._router(block)
        router: Any = routers_in(block)[0]
        score = _score_of(router, c.top_k, bool(c.renormalize))
        if score is not None:
            c.score = core.SCORES[score]
        elif self.model.dtype != torch.float32:  # rounding would hide another order from the trial
            raise Unknown(f"the weights of {type(router).__name__} are computed in an unknown order")
        return c


@torch.no_grad()
def _score_of(router: Any, top_k: int, renormalize: bool) -> str | None:
    """Which of two orders has the bits of the router's weights in fp32: softmax of all logits, or of the chosen."""
    wide = copy.deepcopy(router).float()
    generator = torch.Generator("cpu").manual_seed(0)
    x_TH = torch.randn(_ROUTED, wide.weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    with ExactOperators():
        found = wide(x_TH)
        if not isinstance(found, tuple) or len(found) != 3 or found[1].shape != (_ROUTED, top_k):
            return None
        logits_TE, weight_TK, expert_TK = found
        of_all_TK = logits_TE.softmax(-1).gather(-1, expert_TK)
        if renormalize:
            of_all_TK = of_all_TK / of_all_TK.sum(-1, keepdim=True)
        of_chosen_TK = logits_TE.gather(-1, expert_TK).softmax(-1)
    for score, own_TK in (("softmax", of_all_TK), ("topk_softmax", of_chosen_TK)):
        if torch.equal(own_TK, weight_TK.float()):
            return score
    return None


def _trial_tokens(native: NativeModel) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    size = _ROWS, _TOKENS
    return torch.randint(native.vocabulary, size, generator=generator, dtype=torch.int64, device="cpu")


@torch.no_grad()
def _compare(
    native: NativeModel,
    seen: tuple[list[tuple[Tensor, Tensor]], Tensor],
    caches: tuple[list[Tensor], list[Tensor]],
) -> None:
    """Unknown where a layer, the logits or the cache have other bits than the exact forward pass."""
    ids_BC, (pairs, logits_BCV) = _trial_tokens(native), seen
    own_caches = [[torch.zeros_like(each) for each in of_layers] for of_layers in caches]
    stepper = native.stepper(*own_caches)
    first_B = torch.zeros(_ROWS, dtype=torch.int64, device="cpu")
    own_BV = torch.empty(_ROWS, native.vocabulary, dtype=torch.float32, device="cpu")

    def compare(what: str, got: Tensor, wanted: Tensor) -> None:
        if not torch.equal(got, wanted):
            raise Unknown(f"its {what} has other bits (they differ by {float((got - wanted).abs().max()):.2g})")

    for token in range(_TOKENS):
        position_B1 = torch.full((_ROWS, 1), token, dtype=torch.int64, device="cpu")
        where = {"slot": token, "token_B1": ids_BC[:, token : token + 1].contiguous(), "logits_BV": own_BV}
        for index, (before, after) in enumerate(pairs):
            x_BH = before[:, token].float().contiguous()
            stepper.run(position_B1, first_B, slot=token, x_BH=x_BH, layers=(index, index + 1))
            compare(f"layer {index}", x_BH, after[:, token].float())
        stepper.run(position_B1, first_B, **where)  # type: ignore[arg-type]
        compare("step", own_BV, logits_BCV[:, token].float())
    for name, own_of_layers, theirs_of_layers in zip(("keys", "values"), own_caches, caches, strict=True):
        for index, (own, theirs) in enumerate(zip(own_of_layers, theirs_of_layers, strict=True)):
            compare(f"{name} of layer {index}", own.float(), theirs.float())
