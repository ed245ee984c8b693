"""Options that several commands share (--json, --device, --dtype, --precision, ...), and how they are read.

A bad value raises ValueError with what would have been right. Nothing here loads torch before it is needed: help comes
at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from amoeba.core.errors import bad_value

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Of experts that stay as they are; those that train have recipes, see `amoeba train --precision`.
FROZEN_PRECISIONS = ("bf16", "fp8", "w8a8", "mxfp8", "mxfp4", "nvfp4")

Json = Annotated[bool, Option("--json", help="Print one JSON document as the last line of stdout.")]
Verbose = Annotated[
    bool, Option("-v", "--verbose", help="Explain every decision, and show warnings from other packages.")
]
Device = Annotated[str, Option("--device", help="auto, cpu or cuda.")]
Dtypes = Annotated[list[str] | None, Option("--dtype", help=f"{', '.join(DTYPES)}. Can be repeated.")]

# For every command that loads a model.
ModelArgument = Argument(help="A Hugging Face model folder, an expert store, a GGUF file, or a hub name.")
# On the command line alone: neither a YAML file nor a run's folder may set it.
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code from the model's folder or hub page.")
]
# For models whose experts are frozen.
FrozenExperts = Option(
    "--experts",
    help="Expert placement: resident, cpu-bf16, cpu-int8, cpu-int8-bf16, ranks or auto; or a quantised format: "
    "mxfp4-weights, ...",
)
FrozenPrecision = Annotated[
    str | None,
    Option(
        "--precision",
        help="Expert format: bf16 (unchanged; bf16 products with an fp8 checkpoint), fp8, w8a8 (fp8 activations, too), "
        "mxfp8, mxfp4 or nvfp4; fp8 means --experts fp8-weights.",
    ),
]
Ram = Annotated[
    str | None, Option("--ram", help="Stream the experts. Memory budget for the whole model: 8GiB, ... or auto.")
]
Vram = Annotated[
    str | None,
    Option("--vram", help="Stream to a GPU. GPU memory budget for the whole model; --ram then limits pinned memory."),
]


PlanFile = Annotated[
    Path | None, Option("--plan", help="Use the best of this plan, from `amoeba plan --out` (default: plan now).")
]


@dataclass(frozen=True)
class RunOptions:
    """What `train` and `finetune` have in common. Fields are named as those of `RunSettings`. None: the default."""

    plan: PlanFile = None
    config: Annotated[str | None, Option(help="YAML file with any of these settings. Options override it.")] = None
    resume: Annotated[str | None, Option(help="Resume the run in this folder.")] = None
    start_from: Annotated[
        str | None, Option("--from", help="With --resume: start from this checkpoint instead of the last one.")
    ] = None
    held_out: Annotated[str | None, Option(help="Evaluation data: a share of the data such as 0.05, or a file.")] = None
    minutes: Annotated[float | None, Option(help="Stop after this many minutes.")] = None
    accumulation: Annotated[int | None, Option(help="Batches per optimizer step.")] = None
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Save memory by recomputing activations in backward.")
    ] = False
    expert_ranks: Annotated[int | None, Option(help="Expert-parallel group size (default: all ranks).")] = None
    dense: Annotated[
        str | None, Option(help="Other parameters with --experts ranks: ddp (replicated) or fsdp (sharded).")
    ] = None
    compile: Annotated[str | None, Option(help="Compile the decoder layers: auto (long runs on a GPU), on or off.")] = (
        None
    )
    exact: Annotated[
        bool, Option("--exact", help="Make the forward pass bitwise identical to `generate --exact`. Slower.")
    ] = False
    optimizer_states: Annotated[
        str | None, Option(help="Dtype of AdamW's moments on a GPU: float32, or bfloat16 to save memory.")
    ] = None
    eval_every: Annotated[int | None, Option(help="Steps between evaluations (default: 100).")] = None
    save_every: Annotated[int | None, Option(help="Steps between checkpoints (default: 100).")] = None
    seed: Annotated[
        int | None, Option(help="Random seed for new weights, the held-out share and data order (default: 0).")
    ] = None
    trust_remote_code: TrustRemoteCode = False

    def given(self, own: dict[str, Any]) -> dict[str, Any]:
        """The settings that were given, with a command's `own` options; flags that are not set are left out."""
        told = own | vars(self) | {"held_out": share_or_file(self.held_out)}
        others = ("plan", "config", "resume", "start_from", "trust_remote_code")
        return {
            name: value
            for name, value in told.items()
            if value is not None and value is not False and name not in others
        }

    def of_the_job(self) -> dict[str, Any]:
        """What is no setting of the run."""
        return {
            "resume": self.resume is not None,
            "start_from": self.start_from,
            "trust_remote_code": self.trust_remote_code,
        }


def speaks() -> bool:
    """Whether results are this process's to tell: of those that a launcher started, the first tells them."""
    return os.environ.get("RANK", "0") == "0"


def launched_processes() -> int:
    count = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    return int(count) if count.isdecimal() else 1


def share_or_file(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def experts_in(precision: str | None, experts: str | None) -> str | None:
    """What --experts is where --precision was written, too: fp8 stands for fp8-weights, w8a8 for itself, bf16 for
    nothing."""
    if precision is None:
        return experts
    if precision not in FROZEN_PRECISIONS:
        remedy = "recipes such as fp8-ste are for experts that train, with amoeba train"
        raise bad_value("--precision", f"one of {', '.join(FROZEN_PRECISIONS)}", repr(precision), remedy)
    named = experts if precision == "bf16" else precision if precision == "w8a8" else f"{precision}-weights"
    in_codes = experts is not None and experts.endswith(("-weights", "w8a8"))
    if experts not in (None, "auto", "resident", named) or (precision == "bf16" and in_codes):
        expected = "--experts resident, or no --experts"
        raise bad_value("--precision", expected, f"--experts {experts}", "leave out one of the two")
    return named


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise bad_value("--seed", "0 <= seed < 2**63", seed, "leave it out for 0")


def check_file_to_write(option: str, file: Path, example: str) -> None:
    """Before minutes of work whose result could not be written. example: a name for it."""
    if file.exists() and not file.is_file():
        got = f"{file}, {'a folder' if file.is_dir() else 'a device'}"
        raise bad_value(option, "the name of a file", got, f"add a file name, such as {example}")
    there = next(folder for folder in (file, *file.absolute().parents) if folder.exists())
    if there != file and not there.is_dir():
        raise bad_value(option, "a file in a folder", f"{file}, but {there} is a file", "choose another folder")
    if not os.access(there, os.W_OK):
        raise bad_value(option, "a file that can be written", f"{file}, but {there} is read-only", "write elsewhere")


def parse_device(name: str) -> torch.device:
    import torch

    if name not in DEVICES:
        raise bad_value("--device", f"one of {', '.join(DEVICES)}", repr(name), "leave it out to use the best device")
    if name == "cuda" and not torch.cuda.is_available():
        got = f"'cuda', but torch {torch.__version__} finds no GPU"
        remedy = "use --device cpu, or install a driver that matches your torch: `amoeba doctor` shows what it finds"
        raise bad_value("--device", "a device of this machine", got, remedy)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def parse_dtypes(names: Sequence[str], default: Sequence[torch.dtype]) -> list[torch.dtype]:
    import torch

    found = []
    for name in names:
        full = _SHORT.get(name, name)
        if full not in DTYPES:
            raise bad_value("--dtype", f"one of {', '.join((*DTYPES, *_SHORT))}", repr(name), "repeat it for several")
        found.append(getattr(torch, full))
    return list(dict.fromkeys(found)) or list(default)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
