"""`amoeba merge`: a model and its adapter as one Hugging Face folder, which plain transformers loads.

report = merge("models/base", "runs/mine", "models/mine")
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from amoeba import lora
from amoeba.errors import bad_value, one_line
from amoeba.integrations.model_folder import check_model, find_adapter, load_model, load_tokenizer_and_config
from amoeba.jobs.merged_adapters import check_not_merged, note_merged


@dataclass(frozen=True)
class MergeReport:
    model: str
    base_model: str
    adapter: str
    dtype: str
    experts_layers: int  # whose weights the adapter changed
    linear_layers: int


def merge(
    model_folder: str | Path,
    adapter: str | Path,
    out: str | Path,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Writes W + scaling · B @ A in place of each adapted W; the folder `out` appears whole or not at all.

    dtype: of the written model; None for the base checkpoint's own.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    target = Path(out).expanduser()
    if target.exists():
        raise bad_value("--out", "a folder that is not there yet", f"{str(out)!r}, which is", "choose another name")
    name, adapter = check_model(str(model_folder)), find_adapter(adapter)
    check_not_merged(name, adapter)
    tokenizer, _ = load_tokenizer_and_config(name, adapter, trust_remote_code=trust_remote_code)
    model = load_model(name, dtype, trust_remote_code=trust_remote_code)
    state = lora.load(model, adapter)
    lora.merge(model, keep_base=False)
    lora.detach(model)
    staging = target.with_name(f".{target.name}.writing")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        note_merged(staging, name, adapter)
        os.rename(staging, target)
    except (OSError, SafetensorError) as error:
        raise bad_value(
            "--out", f"room to write {str(out)!r}", one_line(error), "free some space, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return MergeReport(
        model=str(target),
        base_model=name,
        adapter=str(adapter),
        dtype=str(model.dtype).removeprefix("torch."),
        experts_layers=len(state.experts),
        linear_layers=len(state.linears),
    )
