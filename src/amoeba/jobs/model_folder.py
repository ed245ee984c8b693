"""Models, tokenizers and adapters from the folders in which Hugging Face's packages keep them.

name = check_model(folder)                             # ValueError that says what is missing in it
tokenizer, config = load_tokenizer_and_config(name)
model = load_model(name, dtype=None)                   # its experts computed by aMoEba
adapter = find_adapter("runs/mine")                    # the adapter's folder, here or in a run of `amoeba finetune`
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from amoeba.errors import bad_value
from amoeba.lora.adapter_config import CONFIG_NAME

logger = logging.getLogger("amoeba")

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
ADAPTER_FOLDER = "adapter"  # in the folder of a run


def check_model(name: str) -> str:
    path = Path(name).expanduser()
    if not path.exists():
        if _HUB_NAME.fullmatch(name):
            return name
        raise bad_value("MODEL", "an existing folder, or owner/name of a model on the hub", repr(name), "mend the path")
    if not path.is_dir():
        raise bad_value("MODEL", "a folder", f"the file {name!r}", "give the folder it lies in")
    remedy = "give the folder that save_pretrained wrote"
    if not (path / "config.json").is_file():
        raise bad_value("MODEL", "a folder with a config.json", f"{name!r}, which has none", remedy)
    if not has_tokenizer(path):
        raise bad_value(
            "MODEL",
            "a folder with a tokenizer (tokenizer.json)",
            f"{name!r}, which has none",
            f"save the model's there: AutoTokenizer.from_pretrained(...).save_pretrained({name!r})",
        )
    return str(path)


def load_tokenizer_and_config(name: str, adapter: Path | None = None) -> tuple[Any, Any]:
    """The tokenizer is the adapter's where it has one: it may have a chat template that the model's has not."""
    from transformers import AutoConfig, AutoTokenizer

    of_tokenizer = name if adapter is None or not has_tokenizer(adapter) else str(adapter)
    try:
        return AutoTokenizer.from_pretrained(of_tokenizer), AutoConfig.from_pretrained(name)
    except OSError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: OSError) -> ValueError:
    said = str(error).strip().splitlines() or [type(error).__name__]
    here = "a folder" if Path(name).exists() else "no folder here"
    return bad_value(
        "MODEL", "a folder or a hub name that loads", f"{name!r} ({here}): {said[0].rstrip('.')}", "mend the name"
    )


def load_model(name: str, dtype: torch.dtype | None) -> Any:
    """dtype: None for the checkpoint's own."""
    from transformers import AutoModelForCausalLM

    import amoeba.integrations.transformers  # noqa: F401  registers "amoeba"

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", experts_implementation="amoeba")
    except OSError as error:
        raise _unreadable(name, error) from error
    logger.info("dtype %s: %s", model.dtype, "the checkpoint's own" if dtype is None else "as asked")
    return model.eval()


def find_adapter(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    for candidate in (path, path / ADAPTER_FOLDER):
        if (candidate / CONFIG_NAME).is_file():
            return candidate
    got = "a folder without one" if path.is_dir() else "no such folder"
    raise bad_value(
        "--adapter",
        f"a folder with {CONFIG_NAME}, or a finished run of amoeba finetune",
        f"{str(folder)!r}, {got}",
        "check the path; a run that was interrupted has its adapter in checkpoints/",
    )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)
