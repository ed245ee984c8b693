"""What all ranks of a job must have in common, compared before a difference can cause a hang or wrong numbers.

    check_same_job(rank_zero, "amoeba train", settings, {"--resume": False}, model=settings.model)
    check_same_model(rank_zero, model, {"compute dtype": dtype})     # once it is loaded, before the first step

Both raise ValueError on every rank, with the values of all.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import one_line
from amoeba.integrations.model_folder import ADAPTER_CONFIG, ADAPTER_FOLDER
from amoeba.integrations.own_tensors import own_tensors
from amoeba.parallel.rank_zero import RankZero
from amoeba.system.files import sampled_hash
from amoeba.system.machine import versions

# Settings whose values may differ between ranks, and what is compared instead. Every other field of a job's settings is
# compared by its value, also one that is added later.
BY_CONTENT = {
    "model": "the files of the folder (`files_of`); a name is compared as a name",
    "data": "the documents that were read (`amoeba.jobs.train.resume.began_with`)",
    "held_out": "the same, for a file; a share is compared as a number",
}
# Environment variables that change numbers, or which code computes them; patterns as of a shell.
VARIABLES = (
    *("AMOEBA_*", "ATEN_CPU_CAPABILITY", "CUBLAS*", "CUDNN_*", "DISABLE_ADDMM_CUDA_LT", "DNNL_*", "ONEDNN_*"),
    *("MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "NCCL_ALGO", "NCCL_PROTO"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_TUNABLEOP_*", "TORCHDYNAMO_*", "TORCHINDUCTOR_*", "TORCH_ALLOW_TF32*"),
    *("TORCH_BLAS_*", "TORCH_COMPILE_*", "TORCH_CUDNN_*", "TORCH_LINALG_*", "TRITON_*"),
)
# Of these the ones that each rank may have its own of: places on a disk, logs, waits.
OF_ONE_RANK = (
    *("AMOEBA_CACHE", "AMOEBA_DEADLINE", "AMOEBA_TRACEBACK", "CUBLAS*LOG*", "CUDNN_LOG*", "DNNL_VERBOSE*"),
    *("ONEDNN_VERBOSE*", "PYTORCH_TUNABLEOP_FILENAME", "PYTORCH_TUNABLEOP_VERBOSE*", "TORCH*_DIR", "TORCH*_LOG*"),
    *("TORCH*_TRACE*", "TORCH*_VERBOSE", "TRITON_*_DIR", "TRITON_*_PATH", "TRITON_HOME"),
)
PACKAGES = ("amoeba", "torch", "triton", "transformers", "accelerate", "peft")  # that compute
# Of a model's folder: what is computed with, tokenised with and, where that was allowed, run.
_FILES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_SAMPLES = 4096  # numbers of each tensor
# Of a model's configuration: names and versions, which are no numbers
_NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures")


def check_same_job(
    rank_zero: RankZero,
    command: str,
    settings: Any,
    options: Mapping[str, Any],
    *,
    model: str,
    adapter: str | Path | None = None,
) -> None:
    """settings: a dataclass. options: what the command was told besides, by the names that its user knows."""
    if rank_zero.count > 1:
        rank_zero.check_same(job_facts(command, settings, options, model=model, adapter=adapter))


def job_facts(
    command: str, settings: Any, options: Mapping[str, Any], *, model: str, adapter: str | Path | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"command": command, **options, **files_of("--model", model)}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in BY_CONTENT and not isinstance(value, float):
            value = "a file or folder"
        found.setdefault(f"--{field.name.replace('_', '-')}", value)  # of the model there is more already
    if adapter is not None:
        in_run = Path(adapter).expanduser() / ADAPTER_FOLDER
        found |= files_of("--adapter", in_run if (in_run / ADAPTER_CONFIG).is_file() else adapter)
    installed = versions()
    found |= {f"version of {package}": installed[package] for package in PACKAGES}
    return found | {"source of amoeba": _source()} | variables() | torch_switches()


def files_of(option: str, name: str | Path) -> dict[str, Any]:
    """Sizes, and hashes of samples, of the files of a folder; of what is no folder the name, as on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return {option: str(name)}
    files = sorted(path for path in folder.iterdir() if path.suffix in _FILES and path.is_file())
    found = {f"{path.name} of {option}": sampled_hash(path) for path in files}
    samples = {name: f"{each['bytes']} bytes, samples {each['samples'][:12]}" for name, each in found.items()}
    return {option: "a folder"} | samples


def variables() -> dict[str, str]:
    return {
        f"environment variable {name}": value
        for name, value in sorted(os.environ.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in VARIABLES)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in OF_ONE_RANK)
    }


def torch_switches() -> dict[str, Any]:
    """What a program can have set in torch before it started the job, and whether it has a GPU."""
    read: dict[str, Callable[[], Any]] = {
        "torch.cuda.is_available()": torch.cuda.is_available,
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    }
    return {name: _read(switch) for name, switch in read.items()}


def _read(switch: Callable[[], Any]) -> str:
    try:
        return str(switch())
    except RuntimeError as error:  # torch refuses to tell where its older and newer switches were both used
        return one_line(error)


@functools.cache
def _source() -> str:
    """Of this package: a checkout keeps its version from commit to commit."""
    found = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def check_same_model(rank_zero: RankZero, model: Any, more: Mapping[str, Any] | None = None) -> None:
    """Of a model with all of its tensors, before anything shards them. more: what was decided on each rank."""
    if rank_zero.count > 1:
        remedy = "give every rank the same files and versions, on machines of one kind"
        rank_zero.check_same({**(more or {}), **model_facts(model)}, remedy)


def model_facts(model: Any) -> dict[str, Any]:
    """Its configuration, and samples of each tensor that all ranks have; of an expert's that one rank has, nothing."""
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    own = own_tensors(model)
    found = {f"{name} of the model's config": each for name, each in config.items() if name not in _NOT_COMPARED}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in own and not tensor.is_meta:
            found[name] = _sampled(tensor)
    return found


def _sampled(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), min(len(flat), _SAMPLES), dtype=torch.float64, device="cpu")
    some = flat[places.round().long().to(flat.device)].cpu().contiguous()
    digest = hashlib.blake2b(some.view(torch.uint8).numpy().tobytes(), digest_size=6).hexdigest()
    return f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}, samples {digest}"
