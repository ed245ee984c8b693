"""What a training run is told: one frozen record, from flags, from a YAML file, or from both (flags win).

settings = load_settings("run.yaml", {"steps": 500})
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from amoeba.errors import bad_value

Balance = Literal["aux", "bias", "none"]


@dataclass(frozen=True)
class TrainSettings:
    """A run of `amoeba train`.

    model:    a preset's name, or a folder with config.json (trained from scratch) and perhaps weights (trained on).
    data:     a file, a folder or a dataset's name; None for the Python reference that comes with Python.
    balance:  "aux" adds a load-balancing loss for each layer, "bias" shifts selection biases where the architecture
              has them, "none" leaves the router alone.
    z_loss_coefficient: of the loss that keeps router logits small, in any balance.
    """

    model: str = "demo"
    data: str | None = None
    out: str = "runs/demo"
    steps: int = 400
    batch_size: int = 8
    accumulation: int = 1
    sequence_length: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    vocab_size: int = 4096
    balance: Balance = "aux"
    aux_loss_coefficient: float = 0.01
    z_loss_coefficient: float = 0.0
    bias_rate: float = 1e-3
    held_out: float = 0.05
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "sequence_length", "log_every", "eval_every", "save_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad_value(name, "an integer of at least 1", repr(value), f"set {name} to a positive integer")
        for name in ("learning_rate", "weight_decay", "aux_loss_coefficient", "z_loss_coefficient", "bias_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise bad_value(name, "a finite number of at least 0", repr(value), f"set {name} to such a number")
        if self.vocab_size < 300:
            raise bad_value("vocab_size", "at least 300", self.vocab_size, "256 bytes and some merges have to fit")
        if not 0 < self.held_out < 1:
            raise bad_value("held_out", "a share between 0 and 1", self.held_out, "0.05 is customary")
        if self.balance not in get_args(Balance):
            raise bad_value("balance", f"one of {', '.join(get_args(Balance))}", repr(self.balance), "choose one")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise bad_value("dtype", "auto, float32 or bfloat16", repr(self.dtype), "choose one")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_settings(yaml_file: str | None, given: dict[str, Any]) -> TrainSettings:
    """Defaults, then the preset's own, then the file, then what was given."""
    from amoeba.jobs.presets import PRESETS

    from_file = _read(yaml_file) if yaml_file else {}
    model = given.get("model") or from_file.get("model") or TrainSettings.model
    preset = PRESETS[model].training if model in PRESETS else {}
    return TrainSettings(**(preset | {"out": f"runs/{Path(model).name}"} | from_file | given | {"model": model}))


def _read(yaml_file: str) -> dict[str, Any]:
    import yaml

    path = Path(yaml_file)
    if not path.is_file():
        raise FileNotFoundError(f"--config: expected a YAML file; got {yaml_file}, which is not there. Check the path.")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad_value(str(path), "YAML", f"{error}".replace("\n", " "), "mend the file") from error
    known = {entry.name for entry in fields(TrainSettings)}
    if not isinstance(found, dict) or not set(found) <= known:
        unknown = sorted(set(found) - known) if isinstance(found, dict) else type(found).__name__
        raise bad_value(str(path), f"a mapping of {', '.join(sorted(known))}", unknown, "remove or rename these")
    return found
