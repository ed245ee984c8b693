"""adapter_config.json of PEFT: what it may hold, the rank and scaling it gives to a name, and the one we write.

    config = read_config(folder / CONFIG_NAME)
    rank, scaling = rank_and_scaling(config, "model.layers.0.mlp.experts.down_proj")

`peft_files` reads and writes the tensors that belong to it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from amoeba.core.errors import bad_value

CONFIG_NAME = "adapter_config.json"
WRITTEN_VERSION = "0.21.0"  # of PEFT; the form of the tensors is the same since 0.19
UP_PARAMETERS = {True: "gate_up_proj", False: "up_proj"}  # by whether there is a gate
_ORDINARY_A = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:A\.weight|embedding_A)")
# What a field may hold. Everything else changes the base weights, adds tensors, or is another method than LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    **dict.fromkeys(("lora_bias", "use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("kasa_config", "monteclora_config"), (None,)),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


# The kinds of the fields that are used here; the entries of a list are names.
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "auto_mapping"), (dict,)),
    "target_modules": (list, str),
    **dict.fromkeys(("target_parameters", "modules_to_save"), (list,)),
}
_IN_WORDS: dict[type, str] = {dict: "an object", list: "a list of names", str: "a string"}


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise not_found(str(path), "the config of a PEFT adapter", "no such file", "check the path of the folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad_value(str(path), "JSON", error, "copy the adapter again, or save it again with PEFT") from error
    kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
    if kind != "LORA":
        remedy = "only LoRA adapters can be read here; merge with PEFT"
        raise bad_value(f"{path}: peft_type", "LORA", repr(kind), remedy)
    for name, kinds in _KINDS.items():
        value = config.get(name)
        names = value if isinstance(value, list) else ()
        if not (value is None or isinstance(value, kinds)) or not all(isinstance(entry, str) for entry in names):
            expected = " or ".join(_IN_WORDS[kind] for kind in kinds)
            raise bad_value(f"{path}: {name}", expected, repr(value)[:60], "save the adapter again with PEFT")
    _check_patterns(path, config)
    for name, plain in _PLAIN.items():
        if name in config and not any(config[name] is value or config[name] == value for value in plain):
            remedy = "train the adapter without it, or merge it into the model with PEFT (merge_and_unload)"
            raise bad_value(f"{path}: {name}", " or ".join(repr(value) for value in plain), repr(config[name]), remedy)
    return config


def _check_patterns(path: Path, config: dict[str, Any]) -> None:
    target = config.get("target_modules")
    for pattern in [
        *(config.get("rank_pattern") or ()),
        *(config.get("alpha_pattern") or ()),
        *([target] if isinstance(target, str) else []),
    ]:
        try:
            re.compile(pattern)
        except re.error as error:
            raise bad_value(f"{path}: {pattern!r}", "a regular expression", error, "correct it") from error


def not_found(name: str, expected: str, got: str, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(str(bad_value(name, expected, got, remedy)))


def another_model(config: dict[str, Any]) -> str:
    return f"the adapter is for another model: its base model is {config.get('base_model_name_or_path')!r}"


def is_targeted(name: str, targets: Iterable[str]) -> bool:
    """PEFT's own rule for target_parameters."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def rank_and_scaling(config: dict[str, Any], name: str) -> tuple[int, float]:
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
        remedy = "correct lora_alpha or alpha_pattern"
        raise bad_value(f"{CONFIG_NAME}: lora_alpha of {name}", "a finite number, not 0", alpha, remedy)
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def alpha_for(scaling: float, rank: int, use_rslora: bool) -> int | float:
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
        names = [name for name in names if is_targeted(name, config["target_parameters"])]
        name = names[0] if names else match["module"]
        rank, scaling = rank_and_scaling(config, name)
        if tensor.shape[0] != rank:
            remedy = "correct r or rank_pattern"
            raise bad_value(key, f"rank {rank}, as {CONFIG_NAME} says", tuple(tensor.shape), remedy)
        (parameters if names else modules)[name] = (rank, scaling)
    return modules, parameters


def config_to_write(
    config: dict[str, Any], experts: Iterable[str], parameters: dict[str, tuple[int, float]], others: dict[str, Tensor]
) -> dict[str, Any]:
    """`config` with the ranks, alphas and targets that the tensors have.

    experts: names of the experts modules; parameters: rank and scaling of each of their adapted parameters.
    """
    experts = tuple(experts)
    modules, other_parameters = scalings_of_others(config, others)
    use_rslora = bool(config.get("use_rslora"))
    wanted = {
        name: (rank, alpha_for(scaling, rank, use_rslora))
        for name, (rank, scaling) in (parameters | other_parameters | modules).items()
    }
    if not wanted:
        raise bad_value("adapter", "factors of at least one layer", "none", "PEFT does not load an empty adapter")
    (rank, alpha), _ = Counter(wanted.values()).most_common(1)[0]
    possible = [f"{module}.{name}" for module in experts for name in (*UP_PARAMETERS.values(), "down_proj")]
    targets = config.get("target_parameters") or []
    if any(is_targeted(name, targets) != (name in parameters) for name in possible):
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
        "lora_dropout": 0.0 if experts else config.get("lora_dropout", 0.0),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
