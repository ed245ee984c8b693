"""What a user may write after --device and --dtype. A bad value raises ValueError with what would have been right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch

from amoeba.commands.front import typer
from amoeba.conformance import TOLERANCE
from amoeba.errors import bad_value

# For every command that loads a model. On the command line alone: neither a YAML file nor a run's folder may set it.
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that the model's folder or hub page brings.")
]
DEVICES = ("auto", "cpu", "cuda")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_device(name: str) -> torch.device:
    if name not in DEVICES:
        raise bad_value(
            "--device", f"one of {', '.join(DEVICES)}", repr(name), "leave it out for the best that is here"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise bad_value(
            "--device",
            "a device of this machine",
            f"'cuda', and torch {torch.__version__} finds no GPU",
            "use --device cpu, or install a driver and a torch that go together: `amoeba doctor` shows what is found",
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def parse_dtypes(names: Sequence[str], default: Sequence[torch.dtype]) -> list[torch.dtype]:
    found = []
    for name in names:
        full = _SHORT.get(name, name)
        if full not in DTYPES:
            raise bad_value("--dtype", f"one of {', '.join((*DTYPES, *_SHORT))}", repr(name), "repeat it for several")
        found.append(DTYPES[full])
    return list(dict.fromkeys(found)) or list(default)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
