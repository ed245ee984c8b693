"""A second process that compiles, next to a command, the kernels it will need, started before torch is imported.

    with compiling_ahead() as compiler:
        compiler.begin(Work("train", "models/qwen3", batch_size=8, sequence_length=2048))
        ...                                         # weights are read, and the first step finds its kernels

It ends with the command, whatever ends that. Where there is no GPU, or no process can be started, nothing happens.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# For `amoeba warm`, which has no prompt: others are read by the same kernels.
PROMPT_LENGTHS = (16, 32, 64, 128, 256, 512, 2048)


@dataclass(frozen=True)
class Work:
    """What is known of a command when it begins.

    sequence_length: of a row that trains. prompt_lengths: in tokens. documents: of a row, a guess.
    """

    command: str  # train, finetune or generate
    model: str
    batch_size: int = 1
    sequence_length: int = 256
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    documents: int = 8
    vocab_size: int | None = None  # of a preset's tokenizer
    dtype: str = "auto"
    precision: str = "bf16"
    balance: str = "none"
    experts: str = "auto"  # where they are, see `integrations.place_experts`
    rank: int = 0  # of LoRA factors
    targets: tuple[str, ...] = ("experts",)
    optimizer_states: str = "float32"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False

    @classmethod
    def of_run(cls, command: str, settings: Any) -> Work:
        """settings: of `amoeba train` or `amoeba finetune`."""
        shared = ("model", "batch_size", "sequence_length", "dtype", "balance", "optimizer_states")
        given = {name: getattr(settings, name) for name in (*shared, "gradient_checkpointing")}
        if command == "finetune":
            given["experts"] = settings.experts
            return cls(command, **given, rank=settings.r, targets=tuple(settings.targets))
        return cls(command, **given, vocab_size=settings.vocab_size, precision=settings.precision)

    @classmethod
    def of_prompt(cls, model: str, prompt: str, dtype: str = "auto", experts: str = "auto") -> Work:
        """The tokenizer is not read yet: of English it makes a token of three to five characters."""
        tokens = (max(1, len(prompt) // 5), max(1, len(prompt) // 3))
        lengths = (each if each > PROMPT_LENGTHS[-2] else max(16, 1 << (each - 1).bit_length()) for each in tokens)
        return cls("generate", model, prompt_lengths=tuple(dict.fromkeys(lengths)), dtype=dtype, experts=experts)

    @classmethod
    def read(cls, line: str) -> Work:
        given = json.loads(line)
        return cls(**given | {name: tuple(given[name]) for name in ("prompt_lengths", "targets")})


class Compiler:
    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self._process = process

    def begin(self, work: Work | None) -> None:
        """None: there is nothing that could be compiled ahead. What was compiled before is not looked at again."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError, ValueError), self._process.stdin as to:  # it has ended
            if work is not None and not work.experts.startswith(("cpu", "ranks")) and not mark_of(work).exists():
                to.write(json.dumps(asdict(work)) + "\n")
        threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie during a run of days


@contextmanager
def compiling_ahead(*, wanted: bool = True, heard: bool = False) -> Iterator[Compiler]:
    """heard: whether it says on stderr what it did."""
    with second_process("amoeba.jobs.warm", wanted=wanted, heard=heard) as process:
        yield Compiler(process)


@contextmanager
def second_process(
    module: str, *, wanted: bool = True, heard: bool = False, answers: bool = False
) -> Iterator[subprocess.Popen[str] | None]:
    """That is told what to do on its stdin, and ends with this block. answers: on its stdout, to be read."""
    process = None
    if wanted and has_gpu() and "TRITON_INTERPRET" not in os.environ:
        with suppress(OSError):  # no more processes
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
                stderr=None if heard else subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the command, which ends this one
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
    try:
        yield process
    finally:
        if process is not None:
            process.kill()  # its own processes end with it
            process.wait()


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def mark_of(work: Work) -> Path:
    """A file in Triton's cache that says that this was done: it goes when the cache is emptied."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    cache = Path(folder) if folder else Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    about: list[Any] = [asdict(work), max(path.stat().st_mtime for path in Path(__file__).parents[1].rglob("*.py"))]
    with suppress(OSError):
        about.append((Path(work.model) / "config.json").read_text())
    for package in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            about.append(version(package))
    return cache / f"amoeba-warm-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
