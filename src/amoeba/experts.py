"""`experts(x, routing, weights)` computes routed experts, wherever they live, with the best backend.

T tokens · K experts per token · E experts · H hidden

    y_TH = experts(x_TH, Routing(expert_TK, weight_TK), ExpertWeights(gate_up_EJH, down_EHI))
    y_TH = experts(x_TH, routing, weights, lora=LoraFactors(down_lora_a=a_ERI, down_lora_b=b_EHR, scaling=2.0))

    ticket = submit_experts(x_TH, routing, packed)       # experts on the CPU, x on a GPU: their pass begins
    y_TH = shared_experts(x_TH) + ticket.sync()          # while the GPU computes something else

Gradients go to x, to weight_TK (and so to the router), and to every weight, bias and LoRA factor that requires them. An
expert id outside [0, E) is a sentinel: it costs nothing, adds nothing, and its weight gets gradient zero.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from amoeba.backends import fp8_choice
from amoeba.backends.backend import Backend, Request
from amoeba.backends.registry import choose
from amoeba.backends.submitted import Ticket
from amoeba.core.errors import bad_value
from amoeba.core.torch_internals import transformed
from amoeba.core.weights import AnyExperts, LoraFactors
from amoeba.precision.recipes import AUTO
from amoeba.routing.router import Routing


def experts(
    x_TH: Tensor,
    routing: Routing,
    weights: AnyExperts,
    *,
    lora: LoraFactors | None = None,
    backend: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """y_TH = Σ_k weight[t, k] · expert[t, k](x_t).

    x_TH: the tokens, batch and sequence flattened, in the dtype of the weights.
    routing: which experts each token goes to, and with which weights (see `Routing`); ids outside [0, E) are sentinels.
    weights: ExpertWeights, or another kind such as PackedExperts, for which x may also be on a GPU.
    lora: low-rank updates of the projections, computed row by row and never merged into the weights. With frozen
    weights, only the factors' gradients are computed.
    backend: "auto" for the fastest that supports this call, or a backend's name; `amoeba.explain` shows the choice.
    recompute: save only x for backward, which then computes the up projection again.

    Under autocast, x and the weights are cast to the autocast dtype, and y has that dtype.
    """
    chosen, request = _chosen(x_TH, routing, weights, lora, backend, recompute)
    return chosen.run(request)


def submit_experts(
    x_TH: Tensor,
    routing: Routing,
    weights: AnyExperts,
    *,
    lora: LoraFactors | None = None,
    backend: str = "auto",
    recompute: bool = False,
) -> Ticket:
    """Begins what `experts` computes with the same arguments; `sync()` of the ticket returns y_TH, with the same bits.

    PackedExperts are computed in another thread meanwhile, and so is their backward: what is recorded between the two
    calls has its own backward meanwhile. Do not change x, the routing or the factors in place before `sync`. Other
    kinds of weights gain nothing: their pass is launched, or computed, by this call.
    """
    chosen, request = _chosen(x_TH, routing, weights, lora, backend, recompute)
    return chosen.submit(request)


def _chosen(
    x_TH: Tensor, routing: Routing, weights: AnyExperts, lora: LoraFactors | None, backend: str, recompute: bool
) -> tuple[Backend, Request]:
    device = x_TH.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_TH = x_TH.to(dtype)
        weights = weights if weights.dtype == dtype else weights.to(dtype)
    _check(x_TH, routing, weights)
    if lora is not None:
        if not isinstance(lora, LoraFactors):
            raise bad_value(
                "lora", "LoraFactors", type(lora).__name__, "put the factors into amoeba.core.weights.LoraFactors"
            )
        lora.check(weights)
    request = Request(x_TH, routing, weights, lora, recompute)
    if weights.placement == AUTO:
        request = replace(request, weights=fp8_choice.settled(request))
    return choose(backend, request), request


def _check(x_TH: Tensor, routing: Routing, weights: AnyExperts) -> None:
    if x_TH.dim() != 2 or x_TH.shape[1] != weights.hidden:
        raise bad_value(
            "x_TH",
            f"shape (T, {weights.hidden}), where H is that of the weights",
            tuple(x_TH.shape),
            "flatten batch and sequence: x.reshape(-1, H)",
        )
    if routing.expert_TK.shape[0] != x_TH.shape[0]:
        raise bad_value(
            "routing",
            f"one row per token, T = {x_TH.shape[0]}",
            tuple(routing.expert_TK.shape),
            "route the same tokens that you pass as x",
        )
    resident = weights.placement == "resident"
    if x_TH.dtype != weights.dtype:
        raise bad_value(
            "x_TH",
            f"{weights.dtype}, as the weights",
            x_TH.dtype,
            f"cast x {'or the weights' if resident else f'to {weights.dtype}'}, or use torch.autocast",
        )
    if not weights.takes(x_TH.device) or routing.expert_TK.device != x_TH.device:
        raise bad_value(
            "device",
            f"x, routing and weights on {weights.device}" if resident else "x and routing on the CPU or on one GPU",
            f"x on {x_TH.device}, routing on {routing.expert_TK.device}",
            "move them to one device",
        )
    # Reading values means waiting for the device, so a GPU's are checked by routing.check_values() on request only.
    readable = x_TH.device.type == "cpu" and not torch.compiler.is_compiling() and not transformed()
    if readable and not routing.trusted:
        routing.check_values()
