"""The decoder layers of a Hugging Face model compiled one by one, all by the same code.

    layers = CompiledLayers(model)
    layers.begin()
    loss = model(...).loss          # the first call compiles one layer, not the whole model
    layers.end()

What torch.compile makes is kept in the cache folder of aMoEba, so that the next run does not make it again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from amoeba.integrations.compile_cache import keep_compiled_code
from amoeba.loading import loading


class CompiledLayers:
    def __init__(self, model: nn.Module) -> None:
        self.layers = decoder_layers(model)

    def begin(self) -> None:
        keep_compiled_code()
        with loading():  # the compiler
            for layer in self.layers:
                layer.compile()  # for one shape; where a second one comes, for any

    def end(self) -> None:
        for layer in self.layers:
            layer._compiled_call_impl = None

    @staticmethod
    def paused() -> AbstractContextManager:
        """For a batch of another shape, which is not worth compiling for."""
        return torch.compiler.set_stance("force_eager")


def decoder_layers(model: Any) -> list[Any]:
    """The stack that the tokens go through."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h") and len(module) == count:
            return list(module)
    raise NotImplementedError(f"no list of {count} decoder layers in {type(model).__name__}")
