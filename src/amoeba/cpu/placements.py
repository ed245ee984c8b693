"""Experts packed for the CPU's matrix units, as placements."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from amoeba.core.cost import expert_bytes
from amoeba.core.placement import LayerSizes, Load, Placement, Situation, Tolerance
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.node_library import load_node
from amoeba.cpu.numa import numa_cores
from amoeba.cpu.packed_experts import pack_experts
from amoeba.cpu.planner import Plan, check_memory, plan
from amoeba.cpu.pointers import CPU
from amoeba.cpu.weights import PackedKind, current_path, load_packed
from amoeba.system.cpu_features import has_bf16_instructions

# Share of a GPU's free memory that is kept for generation: keys, values and activations.
_SHARE_BESIDE = 0.15
_PATHS = {
    "amx": "products by AMX tiles, of few rows by AVX-512 dot products",
    "avx512": "products by AVX-512 dot products",
    "generic": "products by plain vectors",
}
# Without bf16 instructions: ms of a layer, H=2048 I=768 E=64 K=8, with experts packed in bf16 against resident ones in
# fp32, which take twice the memory: 6.9/11.0 for 1 token, 72/109 for 8, 189/314 for 32, 914/1067 for 256; resident in
# bf16 17.8, 154, 2003 and 1236. A step of LoRA, E=32: 3.4/3.5 s for 128 tokens, 11.9/15.2 s for 512 (2-core
# Neoverse-N1, busy with other work, 2026-11-18).
_IN_FP32 = (
    "stored in bf16 and computed in float32, since this CPU has no bf16 instructions; "
    "--experts cpu-int8 is faster but rounds them"
)
_REMEDY = "Place them as cpu-int8, pass fewer tokens at once (batch size, sequence length), or use checkpointing."


def _why_not() -> str | None:
    try:
        load_packed(), load_node()
    except CoreUnavailable as reason:
        return str(reason)
    return None


def _how() -> str:
    return _PATHS[current_path().name.lower()]


def _chosen(situation: Situation) -> tuple[bool, str]:
    if situation.free_bytes is not None:
        needed, free = situation.expert_bytes, situation.free_bytes
        sizes = f"{needed / 2**30:.1f} GiB of experts, {free / 2**30:.1f} GiB free on the GPU"
        fits = 2 * needed <= free if situation.trains else situation.model_bytes <= (1 - _SHARE_BESIDE) * free
        return not fits, sizes
    if situation.dtype != torch.bfloat16:
        return False, f"the weights are {str(situation.dtype).removeprefix('torch.')}, which packing would round"
    has_bf16 = has_bf16_instructions()
    if has_bf16 and not situation.trains:
        return False, "a CPU reads them where they lie"
    reason = _why_not()
    return reason is None, reason or ("this CPU has bf16 instructions" if has_bf16 else _IN_FP32)


def packed_plans(name: str, layers: Mapping[LayerSizes, int], load: Load, *, training: bool = True) -> tuple[Plan, ...]:
    """The memory of layers in a placement by that name, one plan for each size."""
    kind, backward = _KINDS[name]
    return tuple(
        plan(
            sizes,
            kind=kind,
            nodes=len(numa_cores()),
            ranks=(load.rank,) * 3,
            max_len=load.tokens,
            top_k=load.top_k,
            recompute=load.recompute,
            factor_itemsize=4,
            training=training,
            layers=count,
            backward=backward,
        )
        for sizes, count in layers.items()
    )


def _check_memory(layers: Mapping[LayerSizes, int], load: Load, freed: int, *, name: str) -> tuple[Plan, ...]:
    """Raises MemoryError if the packed experts would not fit with the rest, once their own tensors are freed."""
    plans = packed_plans(name, layers, load)
    together = plans[0] if len(plans) == 1 else Plan(sum((p.items for p in plans), ()), "layers of several sizes")
    check_memory(together, already=freed, remedy=_REMEDY)
    return plans


def _expert_bytes(sizes: LayerSizes, *, itemsize: int) -> int:
    """W of both passes. itemsize: of a number, in both of them together."""
    gated = sizes.activation is None or sizes.activation.gated
    return expert_bytes(hidden=sizes.hidden, intermediate=sizes.intermediate, itemsize=itemsize, gated=gated)


_ITEMSIZE: dict[PackedKind, int] = {"int8": 1, "bf16": 2}
_KINDS: dict[str, tuple[PackedKind, PackedKind]] = {}  # of forward and of backward, by the placement's name


def _packed(
    name: str,
    kind: PackedKind,
    tolerance: Tolerance,
    nodes: int | None = None,
    backward: PackedKind | None = None,
    **more: Any,
) -> Placement:
    """nodes: None for one per NUMA node. backward: None for kind."""
    backward = backward or kind
    _KINDS[name] = kind, backward
    both = "" if backward == kind else f", with a backward in {backward}"
    return Placement(
        name,
        f"packed for the CPU in {kind}{both}",
        make=functools.partial(pack_experts, kind=kind, nodes="auto" if nodes is None else nodes, backward=backward),
        tolerances={torch.bfloat16: tolerance},
        why_not=_why_not,
        home=CPU,
        how=_how,
        itemsize=_ITEMSIZE[kind],
        expert_bytes=functools.partial(_expert_bytes, itemsize=_ITEMSIZE[kind] + _ITEMSIZE[backward]),
        check_memory=functools.partial(_check_memory, name=name),
        offered=nodes is None,
        **more,
    )


# Worst seen on a CPU with AMX in all cases, on each of its paths (2026-11-15): bf16 output 4.9e-3 and gradients 5.8e-3,
# int8 2.7e-2 and 3.3e-2. With an h that is rounded before it is activated, a single row has 5.6e-3.
CPU_PLACEMENTS = (
    _packed("cpu-bf16", "bf16", Tolerance(5e-3, 1e-2), chosen=_chosen),
    _packed("cpu-int8", "int8", Tolerance(3e-2, 5e-2)),
    _packed("cpu-int8-bf16", "int8", Tolerance(3e-2, 1e-2), backward="bf16"),
    _packed("cpu-bf16-3-nodes", "bf16", Tolerance(5e-3, 1e-2), nodes=3),
)
