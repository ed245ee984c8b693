"""Linear layers and embeddings of a GGUF file in the file's blocks, on a CPU that multiplies them as they are stored.

O out · I in

    found = layers_in_blocks(model, {"lm_head.weight": "q6_k"})     # model: on the meta device
    put_blocks(model, "lm_head.weight", "q6_k", rows)                # rows: uint8 (O, bytes of a row)

They are for generating, not for training. Where something else reads their weight, it is dequantised then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.cpu.core import load_core, why_no_core
from amoeba.cpu.pointers import CPU
from amoeba.cpu.weights import ScaledCodes
from amoeba.precision.blocks import BLOCK_KINDS, dequantise_blocks
from amoeba.precision.formats import OF_BLOCKS
from amoeba.system.cpu_features import compute_dtype

_APART = "kv_b_proj"  # which decode steps cut by heads


def layers_in_blocks(model: Any, kinds: Mapping[str, str]) -> dict[str, str]:
    """Of these parameters and their kinds of blocks, those that can stay so. Nothing where the CPU has bf16
    instructions, with which torch's products are faster, or no dot products of bytes, without which each prompt would
    dequantise all."""
    if why_no_core() is not None or not load_core().in_whole_numbers:
        return {}
    if compute_dtype(torch.bfloat16, CPU) != torch.float32:
        return {}
    found = {}
    for name, kind in kinds.items():
        stem, _, last = name.rpartition(".")
        is_known = last == "weight" and kind in OF_BLOCKS and kind != "nf4" and not stem.endswith(_APART)
        # A tied output head would need the embedding's numbers
        layers = (nn.Linear,) if model.config.tie_word_embeddings else (nn.Linear, nn.Embedding)
        if is_known and type(model.get_submodule(stem)) in layers:
            found[name] = kind
    return found


def put_blocks(model: nn.Module, name: str, kind: str, rows: Tensor) -> None:
    path = name.rpartition(".")[0]
    parent, _, own = path.rpartition(".")
    module: Any = model.get_submodule(path)
    layer = BlockLinear(module, kind, rows) if isinstance(module, nn.Linear) else BlockEmbedding(module, kind, rows)
    setattr(model.get_submodule(parent), own, layer.train(module.training))


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In place of a weight until it is there in blocks: it takes no memory."""
    return torch.zeros(1, dtype=dtype, device=CPU).expand(shape)


class _InBlocks(nn.Module):
    """Mixed in before the layer's class. No parameter, so that nothing casts, trains or initialises it."""

    def __init__(self, like: Any, kind: str, rows: Tensor) -> None:
        nn.Module.__init__(self)
        self.kind, self.dtype, self.columns = kind, like.weight.dtype, like.weight.shape[1]
        self.register_buffer("rows", rows, persistent=False)
        for name in like.__constants__:
            setattr(self, name, getattr(like, name))

    @property
    def codes(self) -> ScaledCodes:
        data: Any = self.rows
        block = (1, BLOCK_KINDS[self.kind].numbers)
        return ScaledCodes(data[None], data[None], block, element=self.kind, columns=self.columns)

    @property
    def weight(self) -> Tensor:
        """Dequantised: what is written to it is lost."""
        found = torch.empty(self.codes.shape[1:], dtype=torch.float32, device=CPU)
        load_core().dequantise(self.codes, 0, out=found)
        return found.to(self.dtype)


class BlockLinear(_InBlocks, nn.Linear):  # type: ignore[override]
    def __init__(self, like: nn.Linear, kind: str, rows: Tensor) -> None:
        super().__init__(like, kind, rows)
        self.bias = like.bias

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        x_TI = input.reshape(-1, self.in_features).float().contiguous()
        out_TO = torch.empty(len(x_TI), self.out_features, dtype=torch.float32, device=CPU)
        offs_1 = torch.tensor([len(x_TI)], dtype=torch.int32, device=CPU)
        bias_1O = None if self.bias is None else self.bias.detach().float()[None].contiguous()
        load_core().multiply_whole(offs_1, x_TI, self.codes, out=out_TO, bias_EO=bias_1O)
        return out_TO.view(*input.shape[:-1], self.out_features).to(input.dtype)


class BlockEmbedding(_InBlocks, nn.Embedding):  # type: ignore[override]
    def forward(self, input: Tensor) -> Tensor:
        rows: Any = self.rows
        return dequantise_blocks(rows[input], self.kind, self.columns).to(self.dtype)
