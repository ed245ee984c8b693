"""The implementations that are measured: our backends, transformers' own through its module, SonicMoE and
Liger where they are installed, and for experts with LoRA factors also our experts in every other placement (for
inference in bf16, too), a loop over them in plain torch, and kt-kernel where it is installed.

    found, left_out = implementations(workload, training=True)
    y_TH = found[0].run()

All of them work on the same tensors. `left_out` says of each that is missing why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends import fp8_triton
from amoeba.backends.backend import Request
from amoeba.backends.registry import all_backends_of, backends_of, explain
from amoeba.bench.peers import FUSED_PEERS, fused_peers, kt_kernel_peers
from amoeba.bench.workload import Implementation, Workload
from amoeba.core import cost
from amoeba.core.placement import LayerSizes
from amoeba.core.weights import AnyExperts, ExpertWeights
from amoeba.experts import experts
from amoeba.placements import all_placements
from amoeba.precision import UnchangedWeights
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.precision.recipes import SUMMARIES, W8A8, with_precision
from amoeba.routing.router import Routing
from amoeba.system.machine import available_memory

TRANSFORMERS = ("eager", "batched_mm", "grouped_mm")
PEERS = (*TRANSFORMERS, *FUSED_PEERS, "loop", "kt_kernel")
THROUGH_TRANSFORMERS = "amoeba (transformers)"
LOOP = "torch loop"
_LORA_PEERS = {"loop": LOOP, "kt_kernel": "kt-kernel"}
# Share of the free memory that copies of weights may take: those gathered by batched_mm, packed ones.
_SHARE_OF_MEMORY = 0.8
# fp32 copies of larger layers are not made: they would say little that bf16 does not.
_LARGEST_FP32_COPY = 1 << 30
_NOT_ASKED_FOR = "was not asked for"
_WARM, _RECOMPUTED = ", weights unchanged", ", h recomputed"
# Frozen experts in codes. On a GPU they are measured with few tokens, and with many where they are asked for; on a CPU
# also by what `auto` leaves aside, where that is asked for.
_CODED = ("fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights")
BY_BACKEND = {f"{coded} by {backend}": (coded, backend) for coded in _CODED for backend in ("eager", "cpu-fused")}
RECIPES = tuple(recipe + way for recipe in SUMMARIES for way in ("", _WARM, _RECOMPUTED))


def implementations(
    workload: Workload, *, training: bool, peers: Sequence[str] = PEERS, ours: Sequence[str] | None = None
) -> tuple[list[Implementation], dict[str, str]]:
    """All that can take this workload, ours first, and the reason for each that cannot.

    ours: names of ours, as they are printed and without "amoeba"; None: all.
    """
    parts = [_our_backends(workload)]
    lora, infers = workload.lora is not None, workload.device.type == "cpu" and not training
    if not lora:
        parts.append(_in_fp8(workload))
    on_gpu = workload.device.type == "cuda" and not training
    asked = workload.shape.forward_only or any(name in (*_CODED, W8A8) for name in ours or ())
    if lora or ((infers or (on_gpu and asked)) and workload.dtype == torch.bfloat16):
        parts += [more(workload, ours) for more in (_elsewhere, _by_other_backends, _in_fp32)]
    if lora:
        parts.append(_lora_peers(workload, peers))
    else:
        parts += [_transformers_ways(workload, training, peers), fused_peers(workload, peers)]
    found = [each for some, _ in parts for each in some]
    left_out = {name: reason for _, reasons in parts for name, reason in reasons.items()}
    unwanted = [each.name for each in found if each.ours and not _is_wanted(each.name, ours)]
    return [each for each in found if each.name not in unwanted], left_out | dict.fromkeys(unwanted, _NOT_ASKED_FOR)


def _is_wanted(name: str, ours: Sequence[str] | None) -> bool:
    return ours is None or name.removeprefix("amoeba ") in ours


def _lora_peers(workload: Workload, peers: Sequence[str]) -> tuple[list[Implementation], dict[str, str]]:
    found: list[Implementation] = []
    without = (THROUGH_TRANSFORMERS, *map(_peer, TRANSFORMERS))
    left_out = dict.fromkeys(without, "transformers' experts take no factors")
    left_out |= dict.fromkeys(FUSED_PEERS.values(), "its experts take no factors")
    for name, make in (("loop", _loops), ("kt_kernel", kt_kernel_peers)):
        if name in peers:
            more_found, more_left_out = make(workload)
            found, left_out = found + more_found, left_out | more_left_out
        else:
            left_out[_LORA_PEERS[name]] = _NOT_ASKED_FOR
    return found, left_out


def _transformers_ways(
    workload: Workload, training: bool, peers: Sequence[str]
) -> tuple[list[Implementation], dict[str, str]]:
    try:
        through_module = _transformers_modules(workload)
    except ImportError as error:
        absent = f"transformers cannot be imported ({error}): pip install 'amoeba-moe[hf]'"
        return [], dict.fromkeys((THROUGH_TRANSFORMERS, *map(_peer, TRANSFORMERS)), absent)
    found, left_out = [Implementation(THROUGH_TRANSFORMERS, True, through_module["amoeba"])], {}
    for name in TRANSFORMERS:
        reason = _why_not_batched(workload, training) if name == "batched_mm" else None
        reason = reason if name in peers else _NOT_ASKED_FOR
        if reason is None:
            found.append(Implementation(_peer(name), False, through_module[name]))
        else:
            left_out[_peer(name)] = reason
    return found, left_out


# Products in fp8 are 6 to 7 % away, see docs/precision.md. `amoeba verify` compares with the same recipe in fp64.
_IN_FP8 = {"output": 0.1, "gradient": 0.1}
# Weights of four bits are 20 % away from what they were made of. `amoeba verify` compares with what they stand for.
_ROUNDED = {"output": 0.3, "gradient": 0.3}
# Rows of four bits as well, in each of two products.
_IN_FP4 = {"output": 0.4, "gradient": 0.4}


def names_of_ours() -> list[str]:
    """What `ours` may name."""
    backends = [backend.name for backend in all_backends_of(ExpertWeights, torch.device("cpu"))]
    placed = [placement.name for placement in all_placements() if placement.offered]
    return [*backends, *RECIPES, *placed, *BY_BACKEND, "in float32", THROUGH_TRANSFORMERS.removeprefix("amoeba ")]


def chosen_by_auto(workload: Workload) -> str | None:
    """The backend that backend="auto" takes for this workload."""
    backend = explain(_request(workload)).backend
    return None if backend is None else backend.name


def _our_backends(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    found, left_out = [], {}
    request = _request(workload)
    for backend in all_backends_of(ExpertWeights, workload.device):
        name = f"amoeba {backend.name}"
        reason = backend.why_not(request)
        if reason is None and backend.name in ("triton", "tasks") and workload.device.type == "cpu":
            reason = "runs in Triton's interpreter here, which says nothing about its speed"
        if reason is None:
            found.append(Implementation(name, True, functools.partial(_through_seam, workload, backend.name)))
        else:
            left_out[name] = reason
    return found, left_out


def _request(workload: Workload) -> Request:
    weights = ExpertWeights(workload.gate_up_EJH, workload.down_EHI)
    return Request(workload.x_TH, _routing(workload), weights, workload.lora)


def _routing(workload: Workload) -> Routing:
    return Routing(workload.expert_TK, workload.weight_TK, trusted=True)


def _through_seam(workload: Workload, backend: str) -> Tensor:
    weights = ExpertWeights(workload.gate_up_EJH, workload.down_EHI)
    return experts(workload.x_TH, _routing(workload), weights, lora=workload.lora, backend=backend)


def _in_fp8(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    """The same layer in fp8; once more with the codes of weights made before, as in all but the first of the passes
    that belong to one step of an optimizer; and with h computed again in backward instead of kept."""
    found: list[Implementation] = []
    left_out: dict[str, str] = {}
    promise = UnchangedWeights()  # one for all recipes, which share the codes
    for recipe in SUMMARIES:
        weights = with_precision(ExpertWeights(workload.gate_up_EJH, workload.down_EHI), recipe)
        request = Request(workload.x_TH, _routing(workload), weights)
        by_kernels = (backend for backend in backends_of(type(weights), workload.device) if backend.name == "triton")
        reason = next(by_kernels).why_not(request)
        if reason is not None:
            left_out |= {f"amoeba {recipe}{way}": reason for way in ("", _WARM, _RECOMPUTED)}
            continue
        every_time = functools.partial(_placed, workload, weights)
        limits = _IN_FP4 if recipe == "nvfp4" else _IN_FP8

        def once(run: Callable[[], Tensor] = every_time) -> Tensor:
            with promise:
                return run()

        found.append(Implementation(f"amoeba {recipe}", True, every_time, limits))
        found.append(Implementation(f"amoeba {recipe}{_WARM}", True, once, limits))
        recomputing = functools.partial(_placed, workload, weights, recompute=True)
        found.append(Implementation(f"amoeba {recipe}{_RECOMPUTED}", True, recomputing, limits))
    return found, left_out


def _elsewhere(workload: Workload, ours: Sequence[str] | None) -> tuple[list[Implementation], dict[str, str]]:
    """Experts in every placement that users may name, placed once, before anything is timed."""
    found, left_out = [], {}
    source = ExpertWeights(workload.gate_up_EJH.detach(), workload.down_EHI.detach())
    sizes = LayerSizes(source.num_experts, source.hidden, source.intermediate)
    for placement in all_placements():
        if not placement.offered:
            continue
        name, reason = f"amoeba {placement.name}", None
        if placement.home is not None and placement.home != workload.device:
            reason = f"is for experts on the {placement.home.type.upper()}"
        elif workload.dtype not in placement.tolerances:
            reason = f"does not compute in {workload.dtype}"
        elif placement.name == W8A8 and (why_not := fp8_triton.why_not_on(workload.device, source)) is not None:
            reason = f"is plain torch here, which says nothing about its speed: {why_not}"
        if not _is_wanted(name, ours):
            reason = _NOT_ASKED_FOR
        expert_bytes = 0 if placement.expert_bytes is None else placement.expert_bytes(sizes)
        reason = reason or _why_no_memory(sizes.experts * expert_bytes, workload.device) or placement.why_not()
        if reason is not None:
            left_out[name] = reason
            continue
        if placement.name not in workload.placed:
            workload.placed[placement.name] = placement.make(source)
        placed = workload.placed[placement.name]
        run = functools.partial(_placed, workload, placed)
        output, gradients, _ = placement.tolerances[workload.dtype]
        tolerance = None if output is None or gradients is None else {"output": output, "gradient": gradients}
        if placement.represent is not None:
            tolerance = _ROUNDED
        codes = placed.tensors() if isinstance(placed, QuantisedExperts) else ()
        parameters = tuple(tensor for tensor in codes if tensor is not None)
        found.append(Implementation(name, True, run, tolerance, itemsize=placement.itemsize, parameters=parameters))
    return found, left_out


def _by_other_backends(workload: Workload, ours: Sequence[str] | None) -> tuple[list[Implementation], dict[str, str]]:
    """Experts in codes by what `auto` does not take for them on a CPU."""
    found, left_out = [], {}
    for name, (coded, backend) in BY_BACKEND.items():
        if ours is None or name not in ours or workload.device.type != "cpu":
            left_out[f"amoeba {name}"] = _NOT_ASKED_FOR if ours is None or name not in ours else "is for a CPU"
            continue
        placement = next(each for each in all_placements() if each.name == coded)
        if coded not in workload.placed:
            source = ExpertWeights(workload.gate_up_EJH.detach(), workload.down_EHI.detach())
            workload.placed[coded] = placement.make(source)
        run = functools.partial(_placed, workload, workload.placed[coded], backend=backend)
        found.append(Implementation(f"amoeba {name}", True, run, _ROUNDED, itemsize=placement.itemsize))
    return found, left_out


def _placed(workload: Workload, weights: AnyExperts, recompute: bool = False, backend: str = "auto") -> Tensor:
    routing = _routing(workload)
    return experts(workload.x_TH, routing, weights, lora=workload.lora, recompute=recompute, backend=backend)


def _in_fp32(workload: Workload, ours: Sequence[str] | None) -> tuple[list[Implementation], dict[str, str]]:
    """Our best for the same layer in fp32, what someone without packed experts would use on a CPU."""
    name = "amoeba in float32"
    if not _is_wanted(name, ours):
        return [], {name: _NOT_ASKED_FOR}
    if _weight_bytes(workload, 4) > _LARGEST_FP32_COPY or workload.device.type != "cpu":
        return [], {name: f"is measured for experts of at most {_LARGEST_FP32_COPY >> 30} GiB on the CPU"}
    weights = ExpertWeights(workload.gate_up_EJH.detach().float(), workload.down_EHI.detach().float())

    def run() -> Tensor:
        return experts(workload.x_TH.float(), _routing(workload), weights, lora=workload.lora)

    return [Implementation(name, True, run, itemsize=4)], {}


def _loops(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    gate_up, down = workload.gate_up_EJH.detach(), workload.down_EHI.detach()
    found = [Implementation(LOOP, False, functools.partial(_loop, workload, gate_up, down))]
    if _weight_bytes(workload, 4) > _LARGEST_FP32_COPY:
        reason = f"is measured for experts of at most {_LARGEST_FP32_COPY >> 30} GiB"
        return found, {f"{LOOP} in float32": reason}
    in_fp32 = functools.partial(_loop, workload, gate_up.float(), down.float())
    return [*found, Implementation(f"{LOOP} in float32", False, in_fp32, itemsize=4)], {}


def _loop(workload: Workload, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
    """One expert after another, as it is usually written, differentiated by autograd."""
    dtype, lora = gate_up_EJH.dtype, workload.lora
    assert lora is not None
    x_TH, weight_TK = workload.x_TH.to(dtype), workload.weight_TK.to(dtype)
    y_TH = torch.zeros_like(x_TH)

    def low_rank(rows: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        assert a is not None and b is not None
        return F.linear(F.linear(rows, a[e].to(dtype)), b[e].to(dtype)) * lora.scaling

    for e in workload.expert_TK.unique().tolist():
        token, slot = torch.where(workload.expert_TK == e)
        x = x_TH[token]
        gate, up = F.linear(x, gate_up_EJH[e]).chunk(2, dim=-1)
        gate = gate + low_rank(x, lora.gate_lora_a, lora.gate_lora_b)
        up = up + low_rank(x, lora.up_lora_a, lora.up_lora_b)
        a = F.silu(gate) * up
        y = F.linear(a, down_EHI[e]) + low_rank(a, lora.down_lora_a, lora.down_lora_b)
        y_TH.index_add_(0, token, y * weight_TK[token, slot, None])
    return y_TH


def _transformers_modules(workload: Workload) -> dict[str, Callable[[], Tensor]]:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from amoeba.integrations.transformers import register

    register()

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

    return {name: forward_of(name) for name in ("amoeba", *TRANSFORMERS)}


def _why_not_batched(workload: Workload, training: bool) -> str | None:
    rows, hidden, intermediate = workload.shape.rows, workload.shape.hidden, workload.shape.intermediate
    copies = cost.weight_bytes(
        experts=rows, hidden=hidden, intermediate=intermediate, itemsize=workload.dtype.itemsize
    )  # a product of gathered weights has those of every routed row
    reason = _why_no_memory(2 * copies if training else copies, workload.device)  # the copies have gradients
    return None if reason is None else f"copies the weights for each of {rows} rows: {reason}"


def _why_no_memory(needed: int, device: torch.device) -> str | None:
    free = available_memory(device)
    if free is None or needed <= _SHARE_OF_MEMORY * free:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def _weight_bytes(workload: Workload, itemsize: int) -> int:
    shape = workload.shape
    return cost.weight_bytes(
        experts=shape.experts, hidden=shape.hidden, intermediate=shape.intermediate, itemsize=itemsize
    )


def _peer(name: str) -> str:
    return f"transformers {name}"
