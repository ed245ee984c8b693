"""Tiny models saved as folders, and what a store of them has to give back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.integrations.experts_module import described, experts_modules, stored
from amoeba.stream.store import Store, aligned_buffer
from tiny_models import build, save_byte_tokenizer


def save(
    folder: Path,
    model_type: str = "qwen3_moe",
    *,
    stacked: bool = False,
    shard: str = "1GB",
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Any:
    """The model; stacked: with the names of transformers' modules, not those of the family's checkpoints."""
    model = build(model_type, **changes).to(dtype)
    model.save_pretrained(folder, save_original_format=not stacked, max_shard_size=shard)
    save_byte_tokenizer(folder)
    return model


TOP_K = 3  # of two numbers the order in which they are added does not matter
SIZES = {"max_position_embeddings": 512, "num_experts_per_tok": TOP_K, "vocab_size": 257}
SIZES |= {"eos_token_id": 256, "pad_token_id": 256}


def outcome_of(model: Any, prompts: Iterable[Tensor], new_tokens: int) -> list[Tensor]:
    """Logits of every prompt, the greedy tokens that follow the short ones, and the logits of each of these steps."""
    found = []
    options = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        for ids in prompts:
            found.append(model(input_ids=ids, use_cache=False).logits)
            if ids.shape[1] <= 7:
                steps = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
                found += [steps.sequences, *steps.logits]
    return found


def expected_experts(model: Any) -> dict[str, tuple[Tensor | None, ...]]:
    """Layer name -> gate_up_EJH with all gates first, down_EHI and biases, from the model's own parameters."""
    found = {}
    for name, module in experts_modules(model).items():
        known = described(module)
        gate_up, down, gate_up_bias, down_bias = (None if t is None else t.detach() for t in stored(module, known))
        if known.interleaved:
            gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
            gate_up_bias = None if gate_up_bias is None else torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
        found[name] = gate_up, down, gate_up_bias, down_bias
    return found


def check_experts(store: Store, model: Any) -> None:
    """Bit for bit."""
    expected = expected_experts(model)
    assert [entry.name for entry in store.layers] == list(expected)
    for layer, entry in enumerate(store.layers):
        tensors = expected[entry.name]
        module = model.get_submodule(entry.name)
        assert (entry.experts, entry.hidden, entry.intermediate) == tensors[1].shape
        assert entry.dtype == torch.bfloat16
        assert entry.activation.kind == described(module).fused.kind
        assert not entry.activation.interleaved
        blob = aligned_buffer(store.expert_bytes(layer))
        for expert in range(entry.experts):
            blob.fill_(255)
            store.read(layer, expert, blob)
            for view, whole in zip(store.views(layer, blob), tensors, strict=True):
                assert (view is None) == (whole is None)
                if view is not None:
                    assert torch.equal(view, whole[expert]), f"{entry.name}, expert {expert}"


def flip(path: Path, place: int) -> None:
    """A bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
