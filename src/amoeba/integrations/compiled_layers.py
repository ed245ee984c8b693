"""The decoder layers of a Hugging Face model compiled one by one, all with the same code, and the final norm.

    layers = CompiledLayers(model)
    layers.begin()
    loss = model(...).loss          # the first call compiles one layer, not the whole model
    layers.end()

Parts that go through a text in chunks, or token by token, stay as they are: the compiler would unroll such a loop, for
minutes. What torch.compile makes is kept in `folder()`: $TORCHINDUCTOR_CACHE_DIR, else a part of our cache.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amoeba.core.torch_internals import TorchDispatchMode, begin_hashing_compiler
from amoeba.integrations.text_model import text_config, text_decoder
from amoeba.system.files import default_folder

LOOP_TOKENS = 256, 512  # of texts that are compared: chunks of a loop have 256 at most
# What transformers calls the norm behind the stack.
_FINAL_NORMS = ("norm", "final_layernorm", "ln_f")


class CompiledLayers:
    """looping: parts of the layers that are not compiled (`looping_parts`)."""

    def __init__(self, model: nn.Module, looping: Sequence[nn.Module] = ()) -> None:
        self.modules, self.looping = [*decoder_layers(model), *final_norm(model)], looping

    def begin(self) -> None:
        keep_compiled_code()
        options = graph_passes()
        for module in self.looping:
            module.forward = torch.compiler.disable(module.forward)
        for module in self.modules:
            module.compile(options=options)  # for one shape; where a second one comes, for any

    def end(self) -> None:
        for module in self.looping:
            module.__dict__.pop("forward", None)
        for module in self.modules:
            module._compiled_call_impl = None

    @staticmethod
    def paused() -> AbstractContextManager:
        """For a batch of another shape, which is not worth compiling for."""
        return torch.compiler.set_stance("force_eager")


def looping_parts(model: Any) -> list[nn.Module]:
    """Children of decoder layers that ask for more operators the longer a text is. The model computes twice, where it
    has layers with a state that goes from token to token."""
    from transformers import DynamicCache

    kinds = DynamicCache(config=text_config(model.config)).layers
    if not any(hasattr(kind, "update_recurrent_state") for kind in kinds):
        return []
    layers = decoder_layers(model)
    short, long = (_operators(model, layers, tokens) for tokens in LOOP_TOKENS)
    return [module for module, count in long.items() if count > short.get(module, count)]


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def _operators(model: Any, layers: list[Any], tokens: int) -> dict[nn.Module, int]:
    found: dict[nn.Module, int] = {}
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
    with ExitStack() as hooks, torch.no_grad(), _Operators() as watched:
        for child in (child for layer in layers for child in layer.children()):
            before = child.register_forward_pre_hook(lambda module, _: found.update({module: -watched.count}))
            after = child.register_forward_hook(
                lambda module, *_: found.update({module: found[module] + watched.count})
            )
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        text_decoder(model)(input_ids=ids, use_cache=False)
    return found


def graph_passes() -> dict[str, Any]:
    from amoeba.integrations.inductor_passes import JoinedLinears, KeptSums, SumsIntoExperts  # imports the compiler

    found = {"pre_grad_custom_pass": JoinedLinears(), "joint_custom_post_pass": KeptSums()}
    return found | {"post_grad_custom_pre_pass": SumsIntoExperts()}


def decoder_layers(model: Any) -> list[Any]:
    return list(model.get_submodule(name_of_stack(model)))


def final_norm(model: Any) -> list[Any]:
    """One or none: between stack and output head; op by op, it saves fp32 copies of the hidden states."""
    around = model.get_submodule(name_of_stack(model).rpartition(".")[0])
    return [module for name, module in around.named_children() if name in _FINAL_NORMS]


def name_of_stack(model: Any) -> str:
    """A list may say that it `stands_for` more layers than it has (jobs/warm.py)."""
    count = text_config(model.config).num_hidden_layers
    inside = {id(module) for module in text_decoder(model).modules()}  # a vision part may have as many layers
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h")
        if is_list and getattr(module, "stands_for", len(module)) == count and id(module) in inside:
            return name
    raise NotImplementedError(f"no list of {count} decoder layers in {type(model).__name__}")


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def folder() -> Path:
    """The user's choice, else a part of our cache. OSError for someone without a home."""
    return Path(os.environ.get(_VARIABLE) or default_folder() / "compiled")


def keep_compiled_code() -> None:
    """Unless the user has said where."""
    if importlib.util.find_spec("triton") is not None:
        # Inductor moves Triton's cache into its own folder when it first makes a kernel, and not at all where it finds
        # its kernels there: then ours, compiled after that moment in one run, would be compiled again in the next.
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    with suppress(OSError):  # nowhere to keep it
        os.environ[_VARIABLE] = str(folder())
    begin_hashing_compiler()
