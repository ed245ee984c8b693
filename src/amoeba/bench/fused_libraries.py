"""SonicMoE and Liger as peers on an NVIDIA GPU: their fused experts on the tensors of the workload, where installed.

    found, left_out = fused_peers(workload, ["sonicmoe", "liger"])
    y_TH = found[0].run()

Both choose their tiles by measuring when a shape is first met, which is in the check and so before anything is timed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.bench.implementation import Implementation
from amoeba.bench.workload import Workload
from amoeba.core.errors import one_line

FUSED_PEERS = {"sonicmoe": "SonicMoE", "liger": "Liger"}
_NOT_INSTALLED = {
    "sonicmoe": "install it from github.com/Dao-AILab/sonic-moe, on a Hopper GPU or a later one",
    "liger": "pip install liger-kernel",
}


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

    It wants rows of gate and up in turns, so that it has a copy of these weights, made once, with a gradient of its
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
