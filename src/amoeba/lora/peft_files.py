"""Adapter folders of PEFT, read and written without PEFT: adapter_config.json and adapter_model.safetensors.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    adapter = read_adapter(folder, layouts_of(model))    # experts: factors by module name; others: attention and so on
    write_adapter(folder, adapter)                       # what peft.PeftModel.from_pretrained loads

Read are the files of PEFT 0.17 and later (`target_parameters`) and those of transformers 4, which have one LoRA per
expert and projection. In the first, the keys do not say which parameter they adapt: wrappers are nested in the order
in which the module registers its parameters, the last one outermost. Until PEFT 0.18, A and B of weights stored as
(E, out, in) had changed places; the shapes tell, and where they do not, the version in the file. Without `layouts`
gate and up are taken to lie one after the other. Written is the form of PEFT 0.19 and later, whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.lora.adapter_config import (
    CONFIG_NAME,
    UP_PARAMETERS,
    another_model,
    config_to_write,
    is_targeted,
    not_found,
    rank_and_scaling,
    read_config,
    scalings_of_others,
)
from amoeba.lora.factors import LoraFactors, StackedLora, fit_together, from_peft, rescaled, to_peft, wrong_shapes
from amoeba.system.files import write_whole

TENSORS_NAME = "adapter_model.safetensors"
SWAPPED_BEFORE = (0, 19)
# In the safetensors header, which PEFT ignores: {module: gate_rank} of the layers whose gate and up are apart.
GATE_RANKS = "amoeba_gate_ranks"
BASE = "amoeba_base_model"  # there too: what `base_of` says of the model

_PREFIX = "base_model.model."
_LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?P<nesting>(?:\.base_layer)*)\.lora_(?P<factor>[AB])\.weight"
)
_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)")
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


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
    base: dict[str, Any] = field(default_factory=dict)  # of the model it was trained on; empty in PEFT's own files


def read_adapter(
    folder: str | Path, layouts: Mapping[str, ExpertsLayout] | None = None, decoder: str | None = None
) -> Adapter:
    """The adapter in a PEFT folder, on the CPU and in the dtype of the file.

    layouts: of the model it is for (`layouts_of`); with them, an adapter of another model is refused.
    decoder: the name of its text part, where it has others: an adapter may be of the text part alone.
    """
    folder = Path(folder)
    config = read_config(folder / CONFIG_NAME)
    tensors, metadata = _read_tensors(folder / TENSORS_NAME)
    inside = f"{_PREFIX}{decoder}."
    if decoder is not None and not any(key.startswith(inside) for key in tensors):
        tensors = {key.replace(f"{_PREFIX}model.", inside, 1): tensor for key, tensor in tensors.items()}
        config = {field: _renamed(found, decoder) for field, found in config.items()}
    gate_ranks, base = (_read_metadata(metadata, key, folder / TENSORS_NAME) for key in (GATE_RANKS, BASE))

    stacked: dict[str, dict[int, dict[str, Tensor]]] = {}  # module -> nesting -> "A", "B"
    single: dict[str, dict[tuple[str, int, str], Tensor]] = {}  # module -> projection, expert, "A" or "B"
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _LORA_KEY.fullmatch(key)
        name = "" if match is None else match["module"]
        one = _ONE_EXPERT.fullmatch(name)
        if match is not None and one is not None and one["projection"] in PROJECTIONS:
            single.setdefault(one["module"], {})[one["projection"], int(one["expert"]), match["factor"]] = tensor
        elif match is not None and (name in layouts if layouts is not None else name.endswith(".experts")):
            nesting = match["nesting"].count(".base_layer")
            stacked.setdefault(name, {}).setdefault(nesting, {})[match["factor"]] = tensor
        elif ".experts." in key and ".lora_" in key:
            names = "...experts[.base_layer].lora_{A,B}.weight or ...experts.{e}.gate_proj.lora_{A,B}.weight"
            names += "" if layouts is None else f" in one of {_some(layouts)}"
            raise bad_value(key, names, f"this key, of shape {tuple(tensor.shape)}", another_model(config))
        else:
            others[key] = tensor

    scalings_of_others(config, others)  # refuses ranks that are not the config's
    experts: dict[str, LoraFactors] = {}
    ungated = set()
    for module, nested in stacked.items():
        layout = None if layouts is None else layouts[module]
        experts[module], gated = _read_stacked(module, nested, config, layout, gate_ranks.get(module))
        ungated |= set() if gated else {module}
    for old_name, tensors_of_module in single.items():
        module = old_name if old_name in (layouts or ()) else old_name.replace(".block_sparse_moe.", ".mlp.")
        experts[module] = _read_single(old_name, tensors_of_module, config)
    used = []
    for module, factors in experts.items() if layouts is not None else ():
        assert layouts is not None
        if module not in layouts:
            raise bad_value(module, f"one of {_some(layouts)}", "no such experts", another_model(config))
        for name, expected, got in wrong_shapes(factors, layouts[module]):
            wanted = f"shape {expected} for {layouts[module]}"
            raise bad_value(f"{module}: {name}", wanted, got, another_model(config))
        used.append(layouts[module])
    return Adapter(
        experts,
        others,
        config,
        gated=not ungated and all(layout.gated for layout in used),
        interleaved=any(layout.interleaved for layout in used),
        base=base,
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
        named = {UP_PARAMETERS[adapter.gated]: peft.gate_up, "down_proj": peft.down}
        present = [(name, stacked) for name, stacked in named.items() if stacked is not None]
        for nesting, (name, stacked) in enumerate(reversed(present)):
            key = f"{_PREFIX}{module}{'.base_layer' * nesting}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = stacked.lora_A, stacked.lora_B
            num_experts = next(iter(factors.tensors().values())).shape[0]
            parameters[f"{module}.{name}"] = (stacked.lora_A.shape[0] // num_experts, stacked.scaling)
    written = config_to_write(adapter.config, adapter.experts, parameters, adapter.others)
    config = json.dumps(written, indent=2, sort_keys=True, allow_nan=False)

    folder.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=folder, prefix=".", suffix=".safetensors")
    os.close(handle)
    try:
        on_cpu = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        noted = {key: json.dumps(found) for key, found in ((GATE_RANKS, gate_ranks), (BASE, adapter.base)) if found}
        save_file(on_cpu, staged, metadata={"format": "pt"} | noted)
        os.chmod(staged, 0o644)
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        os.replace(staged, folder / TENSORS_NAME)
    finally:
        Path(staged).unlink(missing_ok=True)
    write_whole(folder / CONFIG_NAME, config + "\n")


def _renamed(found: Any, decoder: str) -> Any:
    """Names and patterns of modules in a text model's config, as a model has them in which it is a part."""
    if isinstance(found, list | dict):
        names = [re.sub(r"^model(?=\\?\.)", decoder, each) if isinstance(each, str) else each for each in found]
        return dict(zip(names, found.values(), strict=True)) if isinstance(found, dict) else names
    return found


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        remedy = "check that the folder was copied completely"
        if path.with_suffix(".bin").is_file():
            remedy = "the adapter_model.bin there is a pickle and not read; save it again with safe_serialization=True"
        raise not_found(str(path), "the tensors of a PEFT adapter", "no such file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise bad_value(str(path), "a complete safetensors file", error, "copy the adapter again") from error


def _read_metadata(metadata: dict[str, str], key: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get(key, "{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise bad_value(f"{path}: {key}", "a JSON object", metadata[key][:60], "copy the adapter again")
    return found


def _read_stacked(
    module: str,
    nested: dict[int, dict[str, Tensor]],
    config: dict[str, Any],
    layout: ExpertsLayout | None,
    gate_rank: int | None,
) -> tuple[LoraFactors, bool]:
    up_parameters = UP_PARAMETERS.values() if layout is None else (UP_PARAMETERS[layout.gated],)
    targets = config.get("target_parameters") or ()
    targeted = [name for name in (*up_parameters, "down_proj") if is_targeted(f"{module}.{name}", targets)]
    if sorted(nested) != list(range(len(targeted))) or any(len(pair) != 2 for pair in nested.values()):
        expected = f"lora_A and lora_B for each of {targeted}, which target_parameters names"
        got = {".base_layer" * nesting + ".lora_" + factor for nesting, pair in nested.items() for factor in pair}
        remedy = "LoRA is supported on the parameters gate_up_proj (up_proj without a gate) and down_proj of experts"
        raise bad_value(module, expected, got, remedy)
    found: dict[str, StackedLora] = {}
    counts = set()
    for nesting, name in enumerate(reversed(targeted)):
        rank, scaling = rank_and_scaling(config, f"{module}.{name}")
        a, b = nested[nesting]["A"], nested[nesting]["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] % rank or a.shape[0] != b.shape[1]:
            expected = f"lora_A (E·{rank}, in) and lora_B (out, {rank}·E), the rank being {rank}"
            remedy = f"correct r or rank_pattern in {CONFIG_NAME}"
            raise bad_value(f"{module}.{name}", expected, f"{tuple(a.shape)} and {tuple(b.shape)}", remedy)
        counts.add(a.shape[0] // rank)
        found[name] = StackedLora(a, b, scaling)
    if len(counts) != 1:
        raise bad_value(module, "as many experts in both parameters", sorted(counts), "correct r or rank_pattern")
    gated, down = "up_proj" not in found, found.pop("down_proj", None)
    gate_up = next(iter(found.values()), None)
    if layout is not None:
        gated = layout.gated
    swapped = _is_swapped(module, gate_up, down, config, layout, gated)
    interleaved = layout is not None and layout.interleaved
    told: dict[str, Any] = {"interleaved": interleaved, "swapped": swapped, "gate_rank": gate_rank}
    return from_peft(gate_up, down, counts.pop(), gated=gated, **told), gated


def _is_swapped(
    module: str,
    gate_up: StackedLora | None,
    down: StackedLora | None,
    config: dict[str, Any],
    layout: ExpertsLayout | None,
    gated: bool,
) -> bool:
    """Whether A and B have changed places: by the shapes if only one way fits, else by the version of PEFT."""
    possible = [swapped for swapped in (False, True) if fit_together(gate_up, down, layout, gated, swapped)]
    if not possible:
        shapes = {
            name: (tuple(pair.lora_A.shape), tuple(pair.lora_B.shape))
            for name, pair in ((UP_PARAMETERS[gated], gate_up), ("down_proj", down))
            if pair is not None
        }
        wanted = "gate_up_proj and down_proj of the same experts" if layout is None else str(layout)
        raise bad_value(f"{module}: shapes of lora_A and lora_B", f"those for {wanted}", shapes, another_model(config))
    if len(possible) == 1:
        return possible[0]
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))  # 0.17 wrote none
    is_old = version is None or (int(version[1]), int(version[2])) < SWAPPED_BEFORE
    return is_old and not (layout is not None and layout.transposed)


def _read_single(module: str, tensors: dict[tuple[str, int, str], Tensor], config: dict[str, Any]) -> LoraFactors:
    """The factors of experts that had a LoRA each, as in transformers 4."""
    projections = list(dict.fromkeys(projection for projection, _, _ in tensors))
    experts = range(1 + max(expert for _, expert, _ in tensors))
    every = itertools.product(projections, experts, "AB")
    missing = [
        f"{expert}.{name}.lora_{factor}" for name, expert, factor in every if (name, expert, factor) not in tensors
    ]
    if missing:
        raise bad_value(module, "factors for every expert", f"none for {_some(missing)}", "train all experts alike")
    factors: dict[str, Tensor] = {}
    scaling = None
    for projection in projections:
        low, high = [], []
        for expert in experts:
            name = f"{module}.{expert}.{projection}"
            a, b = tensors[projection, expert, "A"], tensors[projection, expert, "B"]
            rank, own_scaling = rank_and_scaling(config, name)
            scaling = own_scaling if scaling is None else scaling
            shapes = (tuple(a.shape), tuple(b.shape))
            first = (tensors[projection, 0, "A"].shape, tensors[projection, 0, "B"].shape)
            if shapes != first or (a.shape[0], b.shape[1]) != (rank, rank):
                expected = f"({rank}, in) and (out, {rank}), as r or rank_pattern says, the same for every expert"
                remedy = f"correct {CONFIG_NAME}, or train all experts with one rank"
                raise bad_value(f"{name}: lora_A and lora_B", expected, shapes, remedy)
            low.append(a)
            high.append(rescaled(b, own_scaling / scaling))
        name = PROJECTIONS[projection]
        factors |= {f"{name}_lora_a": torch.stack(low), f"{name}_lora_b": torch.stack(high)}
    assert scaling is not None
    return LoraFactors(**factors, scaling=scaling)


def _some(names: Iterable[str]) -> str:
    names = list(names) or ["none"]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
