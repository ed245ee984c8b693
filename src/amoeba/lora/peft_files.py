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
from amoeba.lora.factors import (
    ExpertsLayout,
    LoraFactors,
    StackedLora,
    fit_together,
    from_peft,
    rescaled,
    to_peft,
    wrong_shapes,
)

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
        elif match is not None and (name in layouts if layouts is not None else name.endswith(".experts")):
            nesting = match["nesting"].count(".base_layer")
            stacked.setdefault(name, {}).setdefault(nesting, {})[match["factor"]] = tensor
        elif ".experts." in key and ".lora_" in key:
            raise bad_value(
                key,
                "...experts[.base_layer].lora_{A,B}.weight or ...experts.{e}.gate_proj.lora_{A,B}.weight"
                + ("" if layouts is None else f" in one of {_some(layouts)}"),
                f"this key, of shape {tuple(tensor.shape)}",
                _another_model(config),
            )
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
            raise bad_value(module, f"one of {_some(layouts)}", "no such experts", _another_model(config))
        for name, expected, got in wrong_shapes(factors, layouts[module]):
            wanted = f"shape {expected} for {layouts[module]}"
            raise bad_value(f"{module}: {name}", wanted, got, _another_model(config))
        used.append(layouts[module])
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
            num_experts = next(iter(factors.tensors().values())).shape[0]
            parameters[f"{module}.{name}"] = (stacked.lora_A.shape[0] // num_experts, stacked.scaling)
    config = json.dumps(_config_to_write(adapter, parameters), indent=2, sort_keys=True, allow_nan=False)

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
    write_whole(folder / CONFIG_NAME, config + "\n")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _not_found(str(path), "the config of a PEFT adapter", "no such file", "check the path of the folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise bad_value(str(path), "JSON", error, "copy the adapter again, or save it again with PEFT") from error
    kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
    if kind != "LORA":
        raise bad_value(
            f"{path}: peft_type", "LORA", repr(kind), "only LoRA adapters can be read here; merge with PEFT"
        )
    for name, plain in _PLAIN.items():
        if name in config and not any(config[name] is value or config[name] == value for value in plain):
            raise bad_value(
                f"{path}: {name}",
                " or ".join(repr(value) for value in plain),
                repr(config[name]),
                "train the adapter without it, or merge it into the model with PEFT (merge_and_unload)",
            )
    return config


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        remedy = "check that the folder was copied whole"
        if path.with_suffix(".bin").is_file():
            remedy = "adapter_model.bin is a pickle and not read; save the adapter again with safe_serialization=True"
        raise _not_found(str(path), "the tensors of a PEFT adapter", "no such file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise bad_value(str(path), "a whole safetensors file", error, "copy the adapter again") from error


def _not_found(name: str, expected: str, got: str, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(str(bad_value(name, expected, got, remedy)))


def _read_stacked(
    module: str,
    nested: dict[int, dict[str, Tensor]],
    config: dict[str, Any],
    layout: ExpertsLayout | None,
    gate_rank: int | None,
) -> tuple[LoraFactors, bool]:
    """The factors of one experts module under `target_parameters`, and whether it has a gate."""
    up_parameters = _UP_PARAMETERS.values() if layout is None else (_UP_PARAMETERS[layout.gated],)
    targets = config.get("target_parameters") or ()
    targeted = [name for name in (*up_parameters, "down_proj") if _is_targeted(f"{module}.{name}", targets)]
    if sorted(nested) != list(range(len(targeted))) or any(len(pair) != 2 for pair in nested.values()):
        raise bad_value(
            module,
            f"lora_A and lora_B for each of {targeted}, which target_parameters names",
            {".base_layer" * nesting + ".lora_" + factor for nesting, pair in nested.items() for factor in pair},
            "LoRA is supported on the parameters gate_up_proj (up_proj without a gate) and down_proj of experts",
        )
    found: dict[str, StackedLora] = {}
    counts = set()
    for nesting, name in enumerate(reversed(targeted)):
        rank, scaling = _rank_and_scaling(config, f"{module}.{name}")
        a, b = nested[nesting]["A"], nested[nesting]["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] % rank or a.shape[0] != b.shape[1]:
            raise bad_value(
                f"{module}.{name}",
                f"lora_A (E·{rank}, in) and lora_B (out, {rank}·E), the rank being {rank}",
                f"{tuple(a.shape)} and {tuple(b.shape)}",
                f"correct r or rank_pattern in {CONFIG_NAME}",
            )
        counts.add(a.shape[0] // rank)
        found[name] = StackedLora(a, b, scaling)
    if len(counts) != 1:
        raise bad_value(module, "as many experts in both parameters", sorted(counts), "correct r or rank_pattern")
    gated, down = "up_proj" not in found, found.pop("down_proj", None)
    gate_up = next(iter(found.values()), None)
    if layout is not None:
        gated = layout.gated
    factors = from_peft(
        gate_up,
        down,
        counts.pop(),
        gated=gated,
        interleaved=layout is not None and layout.interleaved,
        swapped=_is_swapped(module, gate_up, down, config, layout, gated),
        gate_rank=gate_rank,
    )
    return factors, gated


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
            for name, pair in ((_UP_PARAMETERS[gated], gate_up), ("down_proj", down))
            if pair is not None
        }
        wanted = "gate_up_proj and down_proj of the same experts" if layout is None else str(layout)
        raise bad_value(f"{module}: shapes of lora_A and lora_B", f"those for {wanted}", shapes, _another_model(config))
    if len(possible) == 1:
        return possible[0]
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))  # 0.17 wrote none
    is_old = version is None or (int(version[1]), int(version[2])) < SWAPPED_BEFORE
    return is_old and not (layout is not None and layout.transposed)


def _read_single(module: str, tensors: dict[tuple[str, int, str], Tensor], config: dict[str, Any]) -> LoraFactors:
    """The factors of experts that had a LoRA each, as in transformers 4."""
    projections = list(dict.fromkeys(projection for projection, _, _ in tensors))
    experts = range(1 + max(expert for _, expert, _ in tensors))
    missing = [
        f"{expert}.{projection}.lora_{factor}"
        for projection in projections
        for expert in experts
        for factor in "AB"
        if (projection, expert, factor) not in tensors
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
            rank, own_scaling = _rank_and_scaling(config, name)
            scaling = own_scaling if scaling is None else scaling
            shapes = (tuple(a.shape), tuple(b.shape))
            first = (tensors[projection, 0, "A"].shape, tensors[projection, 0, "B"].shape)
            if shapes != first or (a.shape[0], b.shape[1]) != (rank, rank):
                raise bad_value(
                    f"{name}: lora_A and lora_B",
                    f"({rank}, in) and (out, {rank}), as r or rank_pattern says, the same for every expert",
                    shapes,
                    f"correct {CONFIG_NAME}, or train all experts with one rank",
                )
            low.append(a)
            high.append(rescaled(b, own_scaling / scaling))
        factors |= {
            f"{_PROJECTIONS[projection]}_lora_a": torch.stack(low),
            f"{_PROJECTIONS[projection]}_lora_b": torch.stack(high),
        }
    assert scaling is not None
    return LoraFactors(**factors, scaling=scaling)


def _another_model(config: dict[str, Any]) -> str:
    return f"the adapter is for another model: its base model is {config.get('base_model_name_or_path')!r}"


def _some(names: Iterable[str]) -> str:
    names = list(names) or ["none"]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_targeted(name: str, targets: Iterable[str]) -> bool:
    """PEFT's own rule for target_parameters."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _rank_and_scaling(config: dict[str, Any], name: str) -> tuple[int, float]:
    """What PEFT takes for the parameter or module of this name: the first pattern that matches, else the default."""

    def look_up(patterns: str, default: str) -> Any:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return config.get(default)

    rank, alpha = look_up("rank_pattern", "r"), look_up("alpha_pattern", "lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise bad_value(f"{CONFIG_NAME}: r of {name}", "a whole number above 0", rank, "correct r or rank_pattern")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise bad_value(
            f"{CONFIG_NAME}: lora_alpha of {name}",
            "a finite number, not 0",
            alpha,
            "correct lora_alpha or alpha_pattern",
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _alpha_for(scaling: float, rank: int, use_rslora: bool) -> int | float:
    """The alpha that PEFT divides to exactly this scaling; a whole number if there is one."""
    divisor = math.sqrt(rank) if use_rslora else rank
    product = scaling * divisor
    if not math.isfinite(product) or product == 0:
        raise bad_value("scaling", "a finite number, not 0", scaling, "leave the factors out to switch them off")
    near = (round(product), product, math.nextafter(product, math.inf), math.nextafter(product, -math.inf))
    return next((alpha for alpha in near if alpha / divisor == scaling), product)


def scalings_of_others(
    config: dict[str, Any], others: dict[str, Tensor]
) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]]]:
    """Rank and scaling of each adapted module and, apart, of each parameter that target_parameters names."""
    modules: dict[str, tuple[int, float]] = {}
    parameters: dict[str, tuple[int, float]] = {}
    for key, tensor in others.items():
        match = _ORDINARY_A.fullmatch(key)
        if match is None:
            continue
        leaves = {target.rpartition(".")[2] for target in config.get("target_parameters") or () if "." in target}
        names = [f"{match['module']}.{leaf}" for leaf in sorted(leaves)]
        names = [name for name in names if _is_targeted(name, config["target_parameters"])]
        name = names[0] if names else match["module"]
        rank, scaling = _rank_and_scaling(config, name)
        if tensor.shape[0] != rank:
            raise bad_value(
                key, f"rank {rank}, as {CONFIG_NAME} says", tuple(tensor.shape), "correct r or rank_pattern"
            )
        (parameters if names else modules)[name] = (rank, scaling)
    return modules, parameters


def _config_to_write(adapter: Adapter, parameters: dict[str, tuple[int, float]]) -> dict[str, Any]:
    config = adapter.config
    modules, other_parameters = scalings_of_others(config, adapter.others)
    use_rslora = bool(config.get("use_rslora"))
    wanted = {
        name: (rank, _alpha_for(scaling, rank, use_rslora))
        for name, (rank, scaling) in (parameters | other_parameters | modules).items()
    }
    if not wanted:
        raise bad_value("adapter", "factors of at least one layer", "none", "PEFT does not load an empty adapter")
    (rank, alpha), _ = Counter(wanted.values()).most_common(1)[0]
    possible = [f"{module}.{name}" for module in adapter.experts for name in (*_UP_PARAMETERS.values(), "down_proj")]
    targets = config.get("target_parameters") or []
    if any(_is_targeted(name, targets) != (name in parameters) for name in possible):
        targets = [*parameters, *other_parameters]
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "task_type": None,
        **config,
        "peft_type": "LORA",
        "peft_version": WRITTEN_VERSION,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: own for name, (own, _) in wanted.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in wanted.items() if own != alpha},
        "target_modules": sorted(modules),
        "target_parameters": sorted(targets),
        # PEFT refuses dropout on parameters; the rest would cut down the targets, which are given by name
        "lora_dropout": 0.0 if adapter.experts else config.get("lora_dropout", 0.0),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
