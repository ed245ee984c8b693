"""The settings of a training run: one frozen record, from flags, a YAML file, or both (flags win).

settings = load_settings("run.yaml", {"steps": 500})

YAML takes 1e-3 for a word and `on` for true; here they are what was meant.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from amoeba.core.errors import bad_value
from amoeba.lora.attaching import check_rank_and_alpha
from amoeba.precision.recipes import OF_ALL_TOKENS, UNCHANGED, W8A8, check_precision

Balance = Literal["aux", "bias", "none"]
Compile = Literal["auto", "on", "off"]
States = Literal["float32", "bfloat16"]
Dense = Literal["ddp", "fsdp"]
Settings = TypeVar("Settings", bound="RunSettings")

# What a setting may do when a run is resumed. Of each:
#   fixed        the numbers of the run depend on it: another value is refused; all that are not named here
#   changeable   it says when something is told or written, or what memory is spent: applied and recorded
#   by content   a file or folder may have moved: what it holds is compared with what the run began with
#   place        the folder of the run, which --resume names
AtResume = Literal["fixed", "changeable", "by content", "place"]
AT_RESUME: defaultdict[str, AtResume] = defaultdict(
    lambda: "fixed", model="by content", data="by content", held_out="by content", out="place"
)
_CADENCES = "log_every", "eval_every", "save_every"
# The numbers are the same with streamed experts, and with as many ranks as there are then.
_SAME_NUMBERS = "ram", "vram", "expert_ranks", "dense", "gradient_checkpointing"
AT_RESUME.update((name, "changeable") for name in (*_CADENCES, *_SAME_NUMBERS))

# What exact mode cannot have, whatever the model. It sees to the rest when it begins.
_NOT_EXACT: dict[str, Callable[[Any], bool]] = {
    "compile": lambda value: value == "on",
    "precision": lambda value: value != UNCHANGED,
    "ram": lambda value: True,
    "vram": lambda value: True,
    "experts": lambda value: value == "ranks",
}


@dataclass(frozen=True)
class RunSettings:
    """What every run that trains something is told.

    balance:  "aux" adds a load-balancing loss for each layer, "bias" shifts selection biases where the architecture
              has them, "none" leaves the router alone.
    minutes:  stop after these: the pace of the machine decides how many steps that is (jobs/train/time_budget.py).
    compile:  decoder layers by torch.compile; "auto" where there is a GPU and the run is long enough.
    expert_ranks: with experts over ranks, over how many of them each layer's are; the groups of that many ranks share
              them by FSDP2. None for all ranks.
    dense:    then also: of all other parameters "ddp", a copy on each rank, or "fsdp", shards by FSDP2.
    exact:    the forward pass has the bits of generation, see `amoeba.exact`.
    """

    model: str
    data: str | None = None
    out: str = "runs/demo"
    batch_size: int = 8
    accumulation: int = 1
    sequence_length: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    balance: Balance = "aux"
    aux_loss_coefficient: float = 0.01
    z_loss_coefficient: float = 0.0
    bias_rate: float = 1e-3
    held_out: float | str = 0.05
    minutes: float | None = None
    gradient_checkpointing: bool = False
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    dtype: str = "auto"
    compile: Compile = "auto"
    optimizer_states: States = "float32"
    experts: str = "resident"
    expert_ranks: int | None = None
    dense: Dense = "ddp"
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "sequence_length", "log_every", "eval_every", "save_every"):
            _check_count(name, getattr(self, name))
        _check_count("warmup_steps", self.warmup_steps, least=0)
        if not 0 <= self.seed < 1 << 32:
            raise bad_value("seed", "a whole number of at least 0 and below 2^32", self.seed, "0 is the default")
        for name in ("learning_rate", "weight_decay", "aux_loss_coefficient", "z_loss_coefficient", "bias_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise bad_value(name, "a finite number of at least 0", repr(value), f"set {name} to such a number")
        minutes = self.minutes
        if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < math.inf):
            raise bad_value("minutes", "a number above 0", repr(minutes), "leave it out for all steps")
        if not isinstance(self.held_out, str) and not 0 < self.held_out < 1:
            remedy = "every run needs held-out text to measure its loss: write for example 0.01, or a file"
            raise bad_value("held_out", "a share above 0 and below 1, or a file", self.held_out, remedy)
        kinds = (("balance", Balance), ("compile", Compile), ("optimizer_states", States), ("dense", Dense))
        for name, kind in kinds:
            if getattr(self, name) not in get_args(kind):
                raise bad_value(name, f"one of {', '.join(get_args(kind))}", repr(getattr(self, name)), "choose one")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise bad_value("dtype", "auto, float32 or bfloat16", repr(self.dtype), "choose one")
        if self.expert_ranks is not None:
            _check_count("expert_ranks", self.expert_ranks)
        if self.experts != "ranks" and (self.expert_ranks is not None or self.dense != "ddp"):
            option = "--dense fsdp" if self.expert_ranks is None else f"--expert-ranks {self.expert_ranks}"
            raise bad_value(option, "--experts ranks", f"experts {self.experts}", "add it, or leave this out")
        for name, refused in _NOT_EXACT.items() if self.exact else ():
            if (value := getattr(self, name, None)) is not None and refused(value):
                raise bad_value("--exact", f"none with --{name} {value}", "both", "leave out one of the two")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    """A run of `amoeba train`.

    model:    a preset's name, or a folder with config.json (trained from scratch) and perhaps weights (trained on).
    data:     a file, a folder or a dataset's name; None for the Python reference that comes with Python.
    experts:  "resident", or "ranks": over the processes that torchrun started, which share each batch.
    precision: in which the experts are computed (see `amoeba.precision.recipes`); "bf16" for the dtype of the run.
    """

    model: str = "demo"
    steps: int = 400
    vocab_size: int = 4096
    precision: str = UNCHANGED

    def __post_init__(self) -> None:
        if self.experts not in ("resident", "ranks"):
            raise bad_value("experts", "resident or ranks", repr(self.experts), "leave it out for resident")
        check_precision(self.precision)
        if self.experts == "ranks" and self.precision == OF_ALL_TOKENS:
            expected = "a recipe whose scales depend on single rows, with --experts ranks"
            raise bad_value("precision", expected, self.precision, "use fp8")
        _check_count("steps", self.steps)
        if self.vocab_size < 300:
            raise bad_value("vocab_size", "at least 300", self.vocab_size, "it must hold 256 bytes and some merges")
        super().__post_init__()


@dataclass(frozen=True)
class FinetuneSettings(RunSettings):
    """A run of `amoeba finetune`: LoRA on a frozen model.

    model:    a folder that save_pretrained wrote, or a name on the hub.
    targets:  what gets factors, see `amoeba.lora.attach`.
    steps:    None for `epochs` passes over the data.
    experts:  where the frozen experts are kept, see `amoeba.integrations.place_experts`.
    ram, vram: budgets of memory through which they are streamed, see `amoeba.stream.attach`.
    """

    sequence_length: int = 1024
    learning_rate: float = 2e-4
    warmup_steps: int = 10
    weight_decay: float = 0.0
    balance: Balance = "none"
    log_every: int = 5
    r: int = 16
    alpha: float = 32
    targets: tuple[str, ...] = ("experts",)
    train_router: bool = False
    steps: int | None = None
    epochs: float = 3.0
    experts: str = "auto"
    ram: str | None = None
    vram: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # a list, where it comes from JSON or YAML
        check_rank_and_alpha(self.r, self.alpha)
        if self.steps is not None:
            _check_count("steps", self.steps)
        if not isinstance(self.epochs, int | float) or not math.isfinite(self.epochs) or self.epochs <= 0:
            raise bad_value("epochs", "a number above 0", repr(self.epochs), "3 passes over the data are usual")
        if self.balance == "bias":
            raise bad_value("balance", "none or aux", "'bias', which changes the frozen model", "leave it out")
        if self.experts == W8A8:
            expected = "experts whose products have gradients"
            raise bad_value("experts", expected, f"{W8A8}, which is for generating", "use --precision fp8")
        super().__post_init__()


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad_value(name, f"an integer of at least {least}", repr(value), f"set {name} to such an integer")


def load_settings(
    yaml_file: str | None,
    given: dict[str, Any],
    kind: type[Settings] = TrainSettings,  # type: ignore[assignment]
) -> Settings:
    """Defaults, then the preset's own, then the file, then what was given."""
    from amoeba.jobs.presets import training_defaults

    told = (read_settings(yaml_file, kind) if yaml_file else {}) | given
    if kind is TrainSettings:
        model = told.setdefault("model", TrainSettings.model)
        told = training_defaults(model) | {"out": f"runs/{Path(model).name}"} | told
    elif not told.get("model"):
        raise bad_value("MODEL", "a folder with a model, or a name on the hub", "none", "name the model to fine-tune")
    else:
        told = {"out": f"runs/{Path(told['model']).name}-finetuned"} | told
    return kind(**told)


_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "nothing"}
_UNFIT = object()


def read_settings(yaml_file: str, kind: type) -> dict[str, Any]:
    import yaml

    path = Path(yaml_file)
    if not path.is_file():
        raise FileNotFoundError(f"--config: expected a YAML file; got {yaml_file}, which is not there. Check the path.")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_value(str(path), "YAML", f"{error}".replace("\n", " "), "correct the file") from error
    hints = get_type_hints(kind)
    if not isinstance(found, dict) or not set(found) <= set(hints):
        raise _unknown(path, found, sorted(hints))
    return {name: _typed(path, name, value, hints[name]) for name, value in found.items()}


def _unknown(path: Path, found: object, known: list[str]) -> ValueError:
    unknown = sorted(str(name) for name in found if name not in known) if isinstance(found, Mapping) else []
    got = ", ".join(map(repr, unknown)) or f"a {type(found).__name__}"
    meant = [near for name in unknown for near in get_close_matches(name, known, n=1)]
    remedy = f"you may have meant {', '.join(meant)}" if meant else "remove or rename unknown settings"
    return bad_value(str(path), f"a mapping of {', '.join(known)}", got, remedy)


def _typed(path: Path, name: str, value: object, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    for kind in kinds:
        fit = _as(kind, value)
        if fit is not _UNFIT:
            return fit
    expected = " or ".join(_in_words(kind) for kind in kinds)
    remedy = "put it in quotes" if str in kinds and isinstance(value, bool | int | float) else "correct the file"
    raise bad_value(f"{name} in {path}", expected, repr(value), remedy)


def _as(kind: Any, value: object) -> Any:
    if get_origin(kind) is Literal:
        if isinstance(value, bool) and "on" in get_args(kind):
            return "on" if value else "off"
        return value if value in get_args(kind) else _UNFIT
    if get_origin(kind) is tuple:
        if isinstance(value, str):  # as the flag takes them
            return tuple(value.replace(",", " ").split())
        return tuple(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else _UNFIT
    if kind is float:
        return _as_number(value)
    return value if type(value) is kind else _UNFIT


def _as_number(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _UNFIT
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return _UNFIT


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return _IN_WORDS.get(kind, "a list of names")
