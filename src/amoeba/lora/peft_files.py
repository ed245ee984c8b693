"""Adapter folders of PEFT, read and written without PEFT: adapter_config.json and adapter_model.safetensors.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    adapter = read_adapter(folder, layouts_of(model))    # experts: factors by module name; others: attention and so on
    write_adapter(folder, adapter)                       # what peft.PeftModel.from_pretrained loads

Read are the files of PEFT 0.17 and later (`target_parameters`) and those of transformers 4, which have one LoRA per
expert and projection. In the first, the keys do not say which parameter they adapt: wrappers are nested in the order
in which the module registers its parameters, the last one outermost. Until PEFT 0.18, A and B of weights stored as
(E, out, in) had changed places; the shapes tell, and where they do not, the version in the file.

Without `layouts` the shapes are checked against each other only, and gate and up are taken to lie one after the other.
For a model that interleaves them (gpt-oss) `layouts` is needed.

Written is the form of PEFT 0.19 and later. An adapter is there whole or not at all: while its tensors are replaced the
folder has no config, and without one neither PEFT nor we read it.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.errors import bad_value
from amoeba.files import write_whole
from amoeba.lora.factors import ExpertsLayout, LoraFactors, StackedLora, from_peft, rescaled, to_peft

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
WRITTEN_VERSION = "0.21.0"  # of PEFT; the form of the tensors is the same since 0.19
SWAPPED_BEFORE = (0, 19)
# In the safetensors header, which PEFT ignores: {module: gate_rank} of the layers whose gate and up are apart.
GATE_RANKS = "amoeba_gate_ranks"

_PREFIX = "base_model.model."
_LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<nesting>(?:\.base_layer)*)\.lora_(?P<factor>[AB])\.weight"
)
_ORDINARY_A = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:A\.weight|embedding_A)")
_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)")
_PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_UP_PARAMETERS = {True: "gate_up_proj", False: "up_proj"}  # by whether there is a gate
# What a field may hold. Everything else changes the base weights, adds tensors, or is another method than LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter folder holds.

    config: adapter_config.json. write_adapter sets its ranks, alphas and targets from the tensors; r, lora_alpha and
    the patterns still say the scaling of `others`.
    """

    experts: dict[str, LoraFactors]  # by the name of the experts module in the base model
    others: dict[str, Tensor] = field(default_factory=dict)  # every other tensor, by its key in the file
    config: dict[str, Any] = field(default_factory=dict)
    gated: bool = True
    interleaved: bool = False


def read_adapter(folder: str | Path, layouts: Mapping[str, ExpertsLayout] | None = None) -> Adapter:
    """The adapter in a PEFT folder, on the CPU and in the dtype of the file.

    layouts: of the model it is for (`layouts_of`); with them, an adapter of another model is refused.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG_NAME)
    tensors, metadata = _read_tensors(folder / TENSORS_NAME)
    gate_ranks = json.loads(metadata.get(GATE_RANKS, "{}"))

    stacked: dict[str, dict[int, dict[str, Tensor]]] = {}  # module -> nesting -> "A", "B"
    single: dict[str, dict[tuple[str, int, str], Tensor]] = {}  # module -> projection, expert, "A" or "B"
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _LORA_KEY.fullmatch(key)
        name = "" if match is None else match["module"]
        one = _ONE_EXPERT.fullmatch(name)
        if match is not None and one is not None and one["projection"] in _PROJECTIONS:
            single.setdefault(one["module"], {})[one["projection"], int(one["expert"]), match["factor"]] = tensor
        elif match is not None and (name in layouts if layouts else name.endswith(".experts")):
            nesting = match["nesting"].count(".base_layer")
            stacked.setdefault(name, {}).setdefault(nesting, {})[match["factor"]] = tensor
        elif ".experts." in key and ".lora_" in key:
            raise bad_value(
                key,
                "...experts[.base_layer].lora_{A,B}.weight, or ...experts.{e}.gate_proj.lora_{A,B}.weight, "
                + ("in one of " + _some(layouts) if layouts else ""),
                f"this key, of shape {tuple(tensor.shape)}",
                _another_model(config),
            )
        else:
            others[key] = tensor

    _scalings_of_others(config, others)  # refuses ranks that are not the config's
    experts: dict[str, LoraFactors] = {}
    ungated = set()
    for module, nested in stacked.items():
        experts[module], gated = _read_stacked(module, nested, config, layouts, gate_ranks.get(module))
        ungated |= set() if gated else {module}
    for old_name, tensors_of_module in single.items():
        module = old_name if layouts and old_name in layouts else old_name.replace(".block_sparse_moe.", ".mlp.")
        experts[module] = _read_single(old_name, tensors_of_module, config)
    for module, factors in experts.items():
        _check_shapes(module, factors, layouts, config)
    used = [layouts[module] for module in experts] if layouts else []
    return Adapter(
        experts,
        others,
        config,
        gated=not ungated and all(layout.gated for layout in used),
        interleaved=any(layout.interleaved for layout in used),
    )


def write_adapter(folder: str | Path, adapter: Adapter) -> None:
    """Writes the folder's two files; other files in it stay."""
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors: dict[str, Tensor] = dict(adapter.others)
    parameters: dict[str, tuple[int, float]] = {}  # name -> rank, scaling
    gate_ranks = {}
    for module, factors in adapter.experts.items():
        peft = to_peft(factors, gated=adapter.gated, interleaved=adapter.interleaved)
        if peft.gate_rank is not None:
            gate_ranks[module] = peft.gate_rank
        named = {_UP_PARAMETERS[adapter.gated]: peft.gate_up, "down_proj": peft.down}
        present = [(name, stacked) for name, stacked in named.items() if stacked is not None]
        for nesting, (name, stacked) in enumerate(reversed(present)):
            key = f"{_PREFIX}{module}{'.base_layer' * nesting}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = stacked.lora_A, stacked.lora_B
            rank = _rank_of(module, factors, name, stacked)
            parameters[f"{module}.{name}"] = (rank, stacked.scaling)
    config = _config_to_write(adapter, parameters)

    folder.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=folder, prefix=".", suffix=".safetensors")
    os.close(handle)
    try:
        on_cpu = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        metadata = {"format": "pt"} | ({GATE_RANKS: json.dumps(gate_ranks)} if gate_ranks else {})
        save_file(on_cpu, staged, metadata=metadata)
        os.chmod(staged, 0o644)
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        os.replace(staged, folder / TENSORS_NAME)
    finally:
        Path(staged).unlink(missing_ok=True)
    write_whole(folder / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n")
