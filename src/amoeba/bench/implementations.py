"""Who computes the experts: our backends through the seam, and transformers' ways through its own module.

    found, left_out = implementations(workload, training=True)
    y_TH = found[0].run()

All of them work on the same tensors. `left_out` says of each that is missing why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amoeba import cost
from amoeba.backends.registry import Request, backends_for
from amoeba.bench.workload import Workload
from amoeba.experts import experts
from amoeba.machine import available_memory
from amoeba.routing import Routing
from amoeba.weights import ExpertWeights

PEERS = ("eager", "batched_mm", "grouped_mm")
THROUGH_TRANSFORMERS = "amoeba (transformers)"
# Share of the free memory that the gathered weights of batched_mm may take.
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class Implementation:
    """A function of the workload, () -> y_TH, that autograd can see through."""

    name: str
    ours: bool
    run: Callable[[], Tensor]


def implementations(
    workload: Workload, *, training: bool, peers: Sequence[str] = PEERS
) -> tuple[list[Implementation], dict[str, str]]:
    """All that can take this workload, ours first, and the reason for each that cannot."""
    found, left_out = _our_backends(workload)
    try:
        through_module = _transformers_modules(workload)
    except ImportError as error:
        absent = f"transformers cannot be imported ({error}): pip install 'amoeba-moe[hf]'"
        return found, left_out | dict.fromkeys((THROUGH_TRANSFORMERS, *map(_peer, PEERS)), absent)
    found.append(Implementation(THROUGH_TRANSFORMERS, True, through_module["amoeba"]))
    for name in PEERS:
        reason = _why_not_batched(workload, training) if name == "batched_mm" else None
        reason = reason if name in peers else "was not asked for"
        if reason is None:
            found.append(Implementation(_peer(name), False, through_module[name]))
        else:
            left_out[_peer(name)] = reason
    return found, left_out


def chosen_by_auto(workload: Workload) -> str | None:
    """The backend that backend="auto" takes for this workload."""
    request = _request(workload)
    return next((backend.name for backend in backends_for(workload.device) if backend.why_not(request) is None), None)


def _our_backends(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    found, left_out = [], {}
    request = _request(workload)
    for backend in backends_for(workload.device):
        name = f"amoeba {backend.name}"
        reason = backend.why_not(request)
        if reason is None and backend.name == "triton" and workload.device.type == "cpu":
            reason = "runs in Triton's interpreter here, which says nothing about its speed"
        if reason is None:
            found.append(Implementation(name, True, functools.partial(_through_seam, workload, backend.name)))
        else:
            left_out[name] = reason
    return found, left_out


def _request(workload: Workload) -> Request:
    return Request(workload.x_TH, _routing(workload), ExpertWeights(workload.gate_up_EJH, workload.down_EHI))


def _routing(workload: Workload) -> Routing:
    return Routing(workload.expert_TK, workload.weight_TK, trusted=True)


def _through_seam(workload: Workload, backend: str) -> Tensor:
    weights = ExpertWeights(workload.gate_up_EJH, workload.down_EHI)
    return experts(workload.x_TH, _routing(workload), weights, backend=backend)


def _transformers_modules(workload: Workload) -> dict[str, Callable[[], Tensor]]:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import amoeba.integrations.transformers  # noqa: F401  registers "amoeba"

    def forward_of(implementation: str) -> Callable[[], Tensor]:
        config: Any = Qwen3MoeConfig(
            hidden_size=workload.shape.hidden,
            moe_intermediate_size=workload.shape.intermediate,
            num_experts=workload.shape.experts,
            num_experts_per_tok=workload.shape.top_k,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            module: Any = Qwen3MoeExperts(config)
        module.gate_up_proj, module.down_proj = workload.gate_up_EJH, workload.down_EHI
        return lambda: module(workload.x_TH, workload.expert_TK, workload.weight_TK)

    return {name: forward_of(name) for name in ("amoeba", *PEERS)}


def _why_not_batched(workload: Workload, training: bool) -> str | None:
    shape = workload.shape
    copies = cost.gathered_weight_bytes(
        rows=shape.rows,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        itemsize=workload.dtype.itemsize,
    )
    needed = 2 * copies if training else copies  # the copies have gradients
    free = available_memory(workload.device)
    if free is None or needed <= _SHARE_OF_MEMORY * free:
        return None
    return (
        f"copies the weights for each of {shape.rows} rows: needs {needed / 2**30:.1f} GiB, "
        f"{free / 2**30:.1f} GiB are free"
    )


def _peer(name: str) -> str:
    return f"transformers {name}"
