"""A tiny model, its adapter, and the ways in which a folder that somebody else made can be wrong."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from amoeba import lora
from tiny_models import build

END = "<end>"
POSITIONS = 64
CODE = "from pathlib import Path\nPath({mark!r}).write_text('ran')\n"


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    found.chat_template = template
    return found


def tiny(model_type: str = "qwen3_moe", **changes: Any) -> Any:
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    sizes = {"vocab_size": 257, "max_position_embeddings": POSITIONS}
    return build(model_type, **special | sizes | changes)


def save_model(folder: Path, model_type: str = "qwen3_moe", **changes: Any) -> Path:
    tiny(model_type, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, model: Any, targets: tuple[str, ...] = ("experts", "q_proj")) -> Path:
    attached = lora.attach(model, r=2, alpha=4, targets=targets)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in attached.experts.values():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    lora.save(model, folder)
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_short(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def drop_tensor(path: Path, ending: str) -> None:
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}, path, {"format": "pt"})


def bring_code(folder: Path, file: str, auto_map: dict[str, Any], mark: Path, **changes: Any) -> None:
    """Python in the folder that leaves a mark when it is imported."""
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    change_json(folder / file, auto_map=auto_map, **changes)
