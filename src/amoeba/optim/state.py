"""What the optimizer keeps of a parameter, and what it asks of parameters, gradients and options."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value

STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DTYPES = (torch.bfloat16, torch.float32)


def first_state(parameter: Tensor, states_dtype: torch.dtype) -> dict[str, Any]:
    """A number of steps on the host, and tensors that lie in memory like the parameter."""
    state: dict[str, Any] = {"step": 0}
    if parameter.dtype == torch.bfloat16:
        state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(parameter, dtype=states_dtype)
    return state


def restored_state(parameter: Tensor, saved: dict[str, Any], states_dtype: torch.dtype) -> dict[str, Any]:
    """A copy of what was saved, by this optimizer or by torch.optim.AdamW, which has no remainders."""
    state = first_state(parameter, states_dtype)
    for name, empty in state.items():
        if name == "remainder" and name not in saved:
            continue
        value = saved.get(name)
        if name == "step" and value is not None:
            state["step"] = int(value)
        elif isinstance(value, Tensor) and value.shape == parameter.shape:
            empty.copy_(value)
        else:
            raise bad_value(
                name,
                f"a state of AdamW of shape {tuple(parameter.shape)}",
                tuple(value.shape) if isinstance(value, Tensor) else value,
                "load the state of the same parameters, in the same order",
            )
    return state


def laid_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or a copy of it that lies in memory as the parameter does, as autograd's own do."""
    if gradient.is_sparse or gradient.dtype not in DTYPES:
        kind = "sparse" if gradient.is_sparse else gradient.dtype
        raise bad_value("gradient", "a dense one in bfloat16 or float32", kind, "use an optimizer of torch.optim")
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def check_place(parameter: Tensor, state: dict[str, Any]) -> None:
    if state["exp_avg"].device != parameter.device:
        raise bad_value(
            "state of the optimizer",
            f"it on {parameter.device}, where its parameter is",
            state["exp_avg"].device,
            "move the model before the first step, or load the optimizer's state anew",
        )


def check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        _check(name, group[name], _is_number(group[name]) and 0 <= group[name] < math.inf, "a number of at least 0")
    betas = group["betas"]
    fit = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)
    _check("betas", betas, fit, "two numbers of at least 0 and below 1")
    _check("states", group["states"], group["states"] in STATES, " or ".join(STATES))
    _check("seed", group["seed"], isinstance(group["seed"], int), "an integer")
    for parameter in group["params"]:
        _check_parameter(parameter)


def _check(name: str, given: object, fit: bool, expected: str) -> None:
    if not fit:
        raise bad_value(name, expected, repr(given), f"change {name}, of the optimizer or of the group of parameters")


def _is_number(value: object) -> bool:
    # a tensor would have to be read from its device
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_parameter(parameter: Tensor) -> None:
    remedy = "use torch.optim.AdamW for it"
    if parameter.dtype not in DTYPES:
        raise bad_value("parameter", "bfloat16 or float32", parameter.dtype, f"convert it, or {remedy}")
    if hasattr(parameter, "__tensor_flatten__"):
        raise bad_value("parameter", "a plain tensor", type(parameter).__name__, remedy)
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        lies = f"strides {parameter.stride()} of a tensor of shape {tuple(parameter.shape)}"
        raise bad_value("parameter", "dense memory", lies, "make the parameter of a .contiguous() copy")
