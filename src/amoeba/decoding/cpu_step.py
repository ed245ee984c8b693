"""Steps on a CPU by one call of the C++ core each: all layers of a decoder, from a token to its logits, without Python.

B rows · C tokens · H hidden · Q query heads · G key and value heads · D of a head · L slots · V vocabulary

    native = native_model(model)            # NativeModel, or why not; weights are packed once for each model
    step = CpuStep(native, rows, None)      # as `Step`, which runs transformers' layers
    step()

A model is recognised in two steps. Its modules have to be of known parts (`model_reader`). Then it is evaluated: for a
few random tokens, what each layer adds to its input, and the logits, have to be what the core computes of the same
input. Attention, masks and scales are compared that way, too. What is not recognised keeps transformers' loop, and the
reason is reported. In exact mode, steps are those of `exact_step`.

Between weights the core computes in fp32. Weights in fp32 that bf16 holds exactly, as those of a bf16 checkpoint on a
CPU without bf16 instructions, are read from a copy in bf16.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from amoeba.cpu import step as core
from amoeba.cpu.build import CoreUnavailable
from amoeba.decoding.exact_step import read_exactly
from amoeba.decoding.model_reader import (
    ModelReader,
    NativeModel,
    Unknown,
    hidden_states,
    is_adapted,
    keys_and_values,
    state_of,
)
from amoeba.decoding.step import Choose, Rows
from amoeba.integrations.exact_mode import Exact, is_exact
from amoeba.integrations.experts_module import is_experts, placed_in
from amoeba.lora.factors import ExpertsLora

logger = logging.getLogger("amoeba")

# Rows and tokens of the evaluation. Of streamed experts each token reads some from the disk.
_SIZES, _SIZES_STREAMED = (2, 8), (1, 3)
# Relative L2 of what a layer adds, the median over the tokens: where two experts are nearly equal, rounding may choose
# the other one. int8 and four bits: transformers' loop rounds rows to int8, or weights to bf16, and the core does not.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_QUANTISED_TOLERANCE = 5e-2


class CpuStep:
    """One token of each row. What it reads of a prompt's keys and values lies in the rows' cache.

    choose: None: the core takes the largest logit. After each step the caches of the cores are full of weights, and any
    operator of torch then takes tens of microseconds: so there is none."""

    def __init__(self, native: NativeModel, rows: Rows, choose: Choose | None) -> None:
        self.native, self.rows, self.choose = native, rows, choose
        batch = rows.token_B1.shape[0]
        self._logits_BV = torch.empty(batch, native.vocabulary, dtype=torch.float32, device="cpu")
        self._first_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        shapes = [(batch, native.key_heads, 1, size) for size in native.cache_sizes]
        like = [torch.empty(shape, dtype=native.dtype, device="cpu") for shape in shapes]
        for layer in rows.cache.layers:
            if not layer.is_initialized:
                layer.lazy_initialization(*like)
        self._arrays = tuple(each.numpy() for each in (rows.live_BL, self._first_B, rows.position_B1))
        self._begin()

    def _begin(self) -> None:
        layers: Any = self.rows.cache.layers
        token_B1 = self.rows.token_B1
        self._stepper = self.native.stepper([layer.keys for layer in layers], [layer.values for layer in layers])
        self._call = self._stepper.call(
            self.rows.position_B1, self._first_B, token_B1=token_B1, logits_BV=self._logits_BV,
            chosen_B1=token_B1 if self.choose is None else None,
        )  # fmt: skip

    def prepare(self, capture: bool) -> None:
        pass

    def rehearse(self) -> None:
        pass

    def check(self) -> None:
        pass

    def __call__(self) -> None:
        if self._stepper.threads != torch.get_num_threads():
            self._begin()
        live_BL, first_B, position_B1 = self._arrays
        live_BL.argmax(1, out=first_B)
        self._stepper.run_call(self._call, int(first_B[0] + position_B1[0, 0]))
        if self.choose is not None:
            self.rows.token_B1.copy_(self.choose(self._logits_BV)[:, None])
        position_B1 += 1


# Of each model, whether it is exact: as what it was recognised.
_known: weakref.WeakKeyDictionary[Any, dict[bool, tuple[tuple, NativeModel | str]]] = weakref.WeakKeyDictionary()


def native_model(model: Any, dense: str = "auto") -> NativeModel | str:
    """What the core computes of it, or why it does not. Found out once, and again when its parameters have changed.

    dense: how projections, shared experts and the output head are read: "auto", as they are, or "int8".
    """
    hooks = (
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    if not all(isinstance(getattr(hook, "__self__", None), Exact) for hook in hooks):
        return "hooks watch the forward passes of its modules"
    tensors = (state_of(each) for each in (*model.parameters(), *model.buffers()))
    adapters = (_adapter_state(module) for module in model.modules())
    state = dense, *tensors, *adapters
    known, exact = _known.setdefault(model, {}), is_exact(model)
    if exact not in known or known[exact][0] != state:
        known[exact] = state, _recognised(model, dense)
    return known[exact][1]


def _adapter_state(module: Any) -> Any:
    """What tensors do not tell of it."""
    if not is_adapted(module):
        streamed = placed_in(module) if is_experts(module) else None
        return module.scaling if isinstance(module, ExpertsLora) else id(streamed)
    merged, active = tuple(module.merged_adapters), tuple(module.active_adapters)
    return module.disable_adapters, merged, active, tuple(module.scaling.items())


def _recognised(model: Any, dense: str) -> NativeModel | str:
    try:
        core.load_step()
        if is_exact(model):
            if dense != "auto":
                return "exact mode rounds no weights to int8"
            return read_exactly(model)
        native = ModelReader(model, dense).read()
        reasons = []
        for rotation in ("halves", "pairs", "pairs to halves")[: 3 if native.is_latent else 2]:
            native.rotation = rotation
            try:
                _check(model, native)
            except Unknown as reason:
                reasons.append(reason)
            else:
                return native
        raise reasons[0]
    except CoreUnavailable as error:
        return str(error)
    except Unknown as reason:
        return f"the core does not know this model: {reason}"


@torch.no_grad()
def _check(model: Any, native: NativeModel) -> None:
    """Unknown where a layer adds something else to its input than the core, or the logits are others."""
    tolerance = _QUANTISED_TOLERANCE if native.quantised else _TOLERANCES[native.dtype]
    rows, tokens = _SIZES_STREAMED if native.streamed else _SIZES
    shapes = [(rows, native.key_heads, tokens, size) for size in native.cache_sizes]
    caches = [[torch.zeros(shape, dtype=native.dtype, device="cpu") for _ in native.layers] for shape in shapes]
    stepper = native.stepper(*caches)
    generator = torch.Generator("cpu").manual_seed(0)
    ids_BC = torch.randint(native.vocabulary, (rows, tokens), generator=generator, dtype=torch.int64, device="cpu")
    pairs, logits_BCV = hidden_states(model, ids_BC)
    first_B = torch.zeros(rows, dtype=torch.int64, device="cpu")
    own_BV = torch.empty(rows, native.vocabulary, dtype=torch.float32, device="cpu")
    last = len(native.layers)
    errors: dict[str, list[float]] = {}

    def compare(what: str, got: Tensor, wanted: Tensor) -> None:
        distance = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
        errors.setdefault(what, []).extend(distance.flatten().tolist())

    for token in range(tokens):
        position_B1 = torch.full((rows, 1), token, dtype=torch.int64, device="cpu")
        for index, (before, after) in enumerate(pairs):
            x_BH = before[:, token].float().contiguous()
            added_BH = after[:, token].float() - x_BH
            own_BH = x_BH.clone()
            stepper.run(position_B1, first_B, slot=token, x_BH=own_BH, layers=(index, index + 1))
            compare(f"layer {index}", own_BH - x_BH, added_BH)
        x_BH = pairs[-1][1][:, token].float().contiguous()
        stepper.run(position_B1, first_B, slot=token, x_BH=x_BH, layers=(last, last), logits_BV=own_BV)
        compare("output head", own_BV, logits_BCV[:, token].float())
        embedded = native.embedded(ids_BC[:, token]).float() * native.embedding_scale
        compare("embedding", embedded, pairs[0][0][:, token].float())
    if native.rotation != "halves" or native.is_latent:
        # a prompt's keys may lie in another order, with the same products
        for name, own_of_layers, theirs_of_layers in zip(
            ("keys", "values"), caches, keys_and_values(model, ids_BC), strict=True
        ):
            for index, (own, theirs) in enumerate(zip(own_of_layers, theirs_of_layers, strict=True)):
                if own.shape != theirs.shape:
                    raise Unknown(f"its cache has {name} of shape {tuple(theirs.shape)}")
                compare(f"{name} of layer {index}", own.float().flatten(2), theirs.float().flatten(2))
    for what, found in errors.items():
        error = sorted(found)[len(found) // 2]
        if not error <= tolerance:
            raise Unknown(f"its {what} computes something else (relative difference {error:.2g})")
    worst = max(sorted(found)[len(found) // 2] for found in errors.values())
    logger.info("the core computes %d layers; the largest difference to transformers is %.2g", last, worst)
