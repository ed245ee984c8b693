"""The decoder layers of a Hugging Face model compiled one by one, all by the same code.

    layers = CompiledLayers(model)
    layers.begin()
    loss = model(...).loss          # the first call compiles one layer, not the whole model
    layers.end()

What torch.compile makes is kept in the cache folder of aMoEba, so that the next run does not make it again.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn

from amoeba.cpu.library_cache import default_folder
from amoeba.loading import loading


class CompiledLayers:
    def __init__(self, model: nn.Module) -> None:
        self.layers = decoder_layers(model)

    def begin(self) -> None:
        _keep_what_is_compiled()
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


def decoder_layers(model: nn.Module) -> list[Any]:
    """The layers that the tokens go through one after another, as transformers marks them for checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _keep_what_is_compiled() -> None:
    """Unless the user has said where."""
    if importlib.util.find_spec("triton") is not None:
        # Inductor moves Triton's cache into its own folder when it first makes a kernel, and not at all where it finds
        # its kernels there: then ours, compiled after that moment in one run, would be compiled again in the next.
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    with suppress(OSError):  # nowhere to keep it
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_folder() / "compiled"))
