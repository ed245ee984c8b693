"""kt-kernel as a peer: LoRA on frozen experts on a CPU with matrix units, as its own package does it.

    found, left_out = kt_kernel_peers(workload)
    y_TH = found[0].run()

Its factors and their gradients are bf16, in buffers of its own that it is told once; they are read for the check. What
it asks of its users after each optimizer step, `update_lora_weights`, is not part of what is timed. Its threads are its
own and pinned: one less than torch has, with which it is fastest on 16.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from amoeba.bench.implementation import INT8_TOLERANCE, Implementation
from amoeba.bench.workload import Workload

METHODS = {"bf16": "AMXBF16_SFT", "int8": "AMXINT8_SFT"}
# It has 5.0e-3 and, in gradients, up to 8.3e-3 on the shapes of Qwen3-30B, DeepSeek-V2-Lite and V3 (2026-11-15); its
# int8 is within the tolerance of ours.
BF16_TOLERANCE = {"output": 1e-2, "gradient": 2e-2}
_TILE_ROWS = 32


def kt_kernel_peers(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    """Its bf16 and int8 experts, loaded; or why there are none."""
    names = {kind: f"kt-kernel {kind}" for kind in METHODS}
    if workload.device.type != "cpu" or workload.dtype != torch.bfloat16:
        return [], dict.fromkeys(names.values(), "is for bf16 on the CPU")
    try:
        wrapper_class = importlib.import_module("kt_kernel.sft.amx").AMXSFTMoEWrapper
        # one buffer for all layers, which knows tokens and not sizes
        importlib.import_module("kt_kernel.sft.base").KExpertsSFTBuffer.clear_cache()
    except Exception as error:  # an extension for another CPU may raise anything
        reason = f"cannot be imported ({str(error).splitlines()[0]}): pip install kt-kernel, on a CPU with AMX"
        return [], dict.fromkeys(names.values(), reason)
    found, left_out = [], {}
    for kind, name in names.items():
        try:
            layer = _Layer(wrapper_class, workload, METHODS[kind])
        except Exception as error:  # whatever it raises is its answer to this problem
            left_out[name] = f"cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        int8 = kind == "int8"
        tolerance = INT8_TOLERANCE if int8 else BF16_TOLERANCE
        run = functools.partial(layer.run, workload)
        found.append(Implementation(name, False, run, tolerance, 1 if int8 else 2, layer.factor_gradients))
    return found, left_out


class _Layer:
    def __init__(self, wrapper_class: Any, workload: Workload, method: str) -> None:
        shape, lora = workload.shape, workload.lora
        assert lora is not None
        rank = shape.rank
        self.wrapper = wrapper_class(
            layer_idx=0,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            num_gpu_experts=0,
            cpuinfer_threads=max(1, torch.get_num_threads() - 1),
            threadpool_count=1,
            weight_path="",
            chunked_prefill_size=max(shape.tokens, _TILE_ROWS),
            lora_rank=rank,
            lora_alpha=lora.scaling * rank,
            method=method,
        )
        factors = {name: factor.detach().bfloat16().contiguous() for name, factor in lora.tensors().items()}
        self.gradients = {name: torch.zeros_like(factor) for name, factor in factors.items()}
        self.wrapper.init_lora_weights(**factors, **{f"grad_{name}": part for name, part in self.gradients.items()})
        # Through its attributes and not load_weights_from_tensors, which in int8 takes its own files only.
        inner = shape.intermediate
        self.wrapper.gate_proj = workload.gate_up_EJH.detach()[:, :inner].contiguous()
        self.wrapper.up_proj = workload.gate_up_EJH.detach()[:, inner:].contiguous()
        self.wrapper.down_proj = workload.down_EHI.detach().contiguous()
        self.wrapper.load_weights(torch.arange(shape.experts, dtype=torch.int64, device="cpu"))

    def run(self, workload: Workload) -> Tensor:
        return _KtExperts.apply(workload.x_TH, workload.weight_TK, workload.expert_TK, self.wrapper)

    def factor_gradients(self) -> dict[str, Tensor]:
        return self.gradients


class _KtExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_TK: Tensor, expert_TK: Tensor, wrapper: Any) -> Tensor:
        ctx.wrapper = wrapper
        train = any(ctx.needs_input_grad)
        return wrapper.forward(x_TH, expert_TK, weight_TK, save_for_backward=train)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dweight_TK = ctx.wrapper.backward(dys[0])
        return dx_TH, dweight_TK.to(dys[0].dtype), None, None
