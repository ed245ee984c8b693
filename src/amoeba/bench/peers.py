"""Peers that may be installed: SonicMoE and Liger on an NVIDIA GPU, kt-kernel on a CPU with matrix units.

    found, left_out = fused_peers(workload, ["sonicmoe", "liger"])
    found, left_out = kt_kernel_peers(workload)
    y_TH = found[0].run()

SonicMoE and Liger compute the tensors of the workload. Both choose their tiles by measuring when a shape is first met,
which is in the check and so before anything is timed.

kt-kernel computes LoRA on frozen experts. Its factors and their gradients are bf16, in buffers of its own that it is
told once; they are read for the check. What it asks of its users after each optimizer step, `update_lora_weights`, is
not part of what is timed. Its threads are its own and pinned: one less than torch has, with which it is fastest on 16.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.bench.workload import INT8_TOLERANCE, Implementation, Workload
from amoeba.core.errors import one_line

FUSED_PEERS = {"sonicmoe": "SonicMoE", "liger": "Liger"}
_NOT_INSTALLED = {
    "sonicmoe": "install it from github.com/Dao-AILab/sonic-moe, on a Hopper GPU or a later one",
    "liger": "pip install liger-kernel",
}
KT_METHODS = {"bf16": "AMXBF16_SFT", "int8": "AMXINT8_SFT"}
# It has 5.0e-3 and, in gradients, up to 8.3e-3 on the shapes of Qwen3-30B, DeepSeek-V2-Lite and V3 (2026-11-15); its
# int8 is within the tolerance of ours.
BF16_TOLERANCE = {"output": 1e-2, "gradient": 2e-2}
_TILE_ROWS = 32


def fused_peers(workload: Workload, peers: Sequence[str]) -> tuple[list[Implementation], dict[str, str]]:
    """Those of `peers` that can take the workload, and why the others cannot."""
    found, left_out = [], {}
    makers: dict[str, Callable[[Workload], Implementation]] = {"sonicmoe": _sonicmoe, "liger": _liger}
    for peer, name in FUSED_PEERS.items():
        if peer not in peers:
            left_out[name] = "was not asked for"
        elif workload.dtype not in (torch.bfloat16, torch.float16) or not is_nvidia_gpu(workload.device):
            left_out[name] = "is for bf16 and fp16 on an NVIDIA GPU"
        elif peer == "sonicmoe" and workload.shape.forward_only:
            left_out[name] = "is for many tokens, as in training"
        else:
            try:
                found.append(makers[peer](workload))
            except ImportError as error:
                left_out[name] = f"cannot be imported ({one_line(error)}): {_NOT_INSTALLED[peer]}"
            except Exception as error:  # another version of it, or no memory for its copy of the weights
                left_out[name] = f"cannot be set up: {type(error).__name__}: {one_line(error)}"
    return found, left_out


def is_nvidia_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _sonicmoe(workload: Workload) -> Implementation:
    layer = _SonicLayer(
        importlib.import_module("sonicmoe.functional"),
        importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU,
        workload,
    )
    return Implementation(
        FUSED_PEERS["sonicmoe"],
        False,
        functools.partial(layer.run, workload),
        gradients=layer.gate_up_gradient,
        parameters=(layer.gate_up_EJH,),
    )


class _SonicLayer:
    """What its own layer does behind its router, with the same number of experts for each token.

    It needs rows of gate and up interleaved, so it has a copy of these weights, made once, with a gradient of its
    own; and ids of experts as int32, as its router gives them."""

    def __init__(self, functional: Any, activation: Any, workload: Workload) -> None:
        self._metadata = functional.TC_topk_router_metadata_triton
        self._up, self._down = functional._UpProjection, functional._DownProjection
        self._activation = activation
        self._expert_TK = workload.expert_TK.int()
        gate_and_up = workload.gate_up_EJH.detach().chunk(2, dim=1)
        self.gate_up_EJH = torch.stack(gate_and_up, dim=2).flatten(1, 2).requires_grad_()

    def run(self, workload: Workload) -> Tensor:
        self.gate_up_EJH.grad = None
        shape, rows, device = workload.shape, workload.shape.rows, workload.device
        place, back, token = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
        count_E = torch.empty(shape.experts, dtype=torch.int32, device=device)
        offset = torch.empty(shape.experts + 1, dtype=torch.int32, device=device)
        self._metadata(self._expert_TK, shape.experts, count_E, offset, token, place, back)
        # after the weights: biases, and then sizes and indices; None and False: each token has as many experts
        a_NI, u_NJ = self._up.apply(
            workload.x_TH,
            self.gate_up_EJH.permute(1, 2, 0),
            None,
            offset,
            rows,
            shape.top_k,
            token,
            place,
            back,
            None,
            False,
            self._activation,
            not torch.is_grad_enabled(),
        )
        return self._down.apply(
            a_NI,
            u_NJ,
            workload.down_EHI.permute(1, 2, 0),
            None,
            workload.weight_TK.float(),
            offset,
            shape.tokens,
            shape.top_k,
            token,
            place,
            back,
            None,
            False,
            self._activation,
        )

    def gate_up_gradient(self) -> dict[str, Tensor]:
        """In the order of the workload; none if it gave none. It is given once, so that it takes no memory later."""
        gradient, self.gate_up_EJH.grad = self.gate_up_EJH.grad, None
        if gradient is None:
            return {}
        return {"gate_up": torch.cat((gradient[:, ::2], gradient[:, 1::2]), dim=1)}


def _liger(workload: Workload) -> Implementation:
    experts = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction
    expert_TK = workload.expert_TK.int()

    def run() -> Tensor:
        return experts.apply(workload.x_TH, workload.gate_up_EJH, workload.down_EHI, expert_TK, workload.weight_TK)

    return Implementation(FUSED_PEERS["liger"], False, run)


def kt_kernel_peers(workload: Workload) -> tuple[list[Implementation], dict[str, str]]:
    """Its bf16 and int8 experts, loaded; or why there are none."""
    names = {kind: f"kt-kernel {kind}" for kind in KT_METHODS}
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
            layer = _KtLayer(wrapper_class, workload, KT_METHODS[kind])
        except Exception as error:  # whatever it raises is its answer to this problem
            left_out[name] = f"cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        int8 = kind == "int8"
        tolerance = INT8_TOLERANCE if int8 else BF16_TOLERANCE
        run = functools.partial(layer.run, workload)
        found.append(Implementation(name, False, run, tolerance, 1 if int8 else 2, layer.factor_gradients))
    return found, left_out


class _KtLayer:
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
