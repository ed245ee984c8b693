"""AdamW for bf16 parameters, with fp32 master weights in two more bytes a parameter.

    optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    norm = optimizer.note_clipping(1.0)       # in place of torch.nn.utils.clip_grad_norm_
    optimizer.step()

What a step does to the master is torch.optim.AdamW's formula in fp32; the parameter is the master, rounded to bf16. A
run that was resumed computes the same bits as one that was not. Nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.optim import torch_step
from amoeba.optim.rounding import join
from amoeba.optim.torch_step import Batch, BatchKind, coefficients


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for parameters in bf16, fp32 or some of each.

    A bf16 parameter keeps its fp32 master exactly: the parameter is the master rounded to nearest, and the state
    `remainder` (int16) holds the missing bits. fp32 parameters are their own masters.

    - params, lr, betas, eps, weight_decay: as in torch.optim.AdamW; parameter groups may differ in them.
    - states: dtype of exp_avg and exp_avg_sq. "bfloat16" saves 4 bytes per parameter. They are then rounded
      stochastically: rounded to nearest, exp_avg_sq would stop shrinking, because a step takes away only 1 - beta2 of
      it, less than bf16 resolves.
    - seed: for the stochastic rounding, which depends only on the seed, the step and the element, so runs repeat.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states, "seed": seed}
        super().__init__(params, options)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._clipping: Tensor | None = None  # the factor of the gradients in the next step
        self._kernels: Any = None  # made when a parameter on a GPU is first seen

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_afresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, self._clipping = self._clipping, None
        for batch in self._batches():
            device = batch.kind.device
            self._steps_on(device).update(batch, None if scale is None else _on(device, scale))
        return loss

    @torch.no_grad()
    def note_clipping(self, max_norm: float) -> Tensor:
        """Lets the next step clip the gradients to this total norm; the gradients stay as they are.

        The norm is returned, one fp32 number on the device of the first gradient. The scale is that of
        torch.nn.utils.clip_grad_norm_, min(1, max_norm / (norm + 1e-6)). A later call replaces an earlier one, and
        zero_grad forgets it.
        """
        if not max_norm >= 0:
            raise bad_value("max_norm", "a number of at least 0", max_norm, "leave the call out to clip nothing")
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = laid_like(parameter, parameter.grad)
                    kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        if not kinds:
            raise bad_value("gradients", "at least one", "none", "call backward() first")
        sums = [self._steps_on(device).sum_of_squares(gradients) for (device, _), gradients in kinds.items()]
        total = torch.stack([_on(sums[0].device, part) for part in sums]).sum()
        norm = total.sqrt()
        self._clipping = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clipping = None
        super().zero_grad(set_to_none)

    def master_of(self, parameter: Tensor) -> Tensor:
        """An fp32 copy of what the parameter is trained as."""
        remainder = self.state[parameter].get("remainder") if parameter in self.state else None
        return parameter.detach().float().clone() if remainder is None else join(parameter.detach(), remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also one of torch.optim.AdamW's. States are converted to this optimizer's `states` where they differ."""
        states = [group["states"] for group in self.param_groups]
        # torch's own would cast every state to the dtype of its parameter
        super().load_state_dict({**state_dict, "state": {}})
        saved = state_dict["state"]
        for group, theirs, name in zip(self.param_groups, state_dict["param_groups"], states, strict=True):
            group["states"] = name
            group.setdefault("seed", self.defaults["seed"])
            for parameter, key in zip(group["params"], theirs["params"], strict=True):
                if key in saved:
                    self.state[parameter] = restored_state(parameter, saved[key], STATES[name])

    def _batches(self) -> list[Batch]:
        """Counts the step. Parameters without a gradient are left out."""
        batches: dict[tuple, Batch] = {}
        position = -1
        for at, group in enumerate(self.param_groups):
            states_dtype = STATES[group["states"]]
            for parameter in group["params"]:
                position += 1
                gradient = parameter.grad
                if gradient is None:
                    continue
                gradient = laid_like(parameter, gradient)
                state = self.state[parameter]
                if not state:
                    state.update(first_state(parameter, states_dtype))
                if state["exp_avg"].device != parameter.device:
                    expected = f"it on {parameter.device}, where its parameter is"
                    remedy = "move the model before the first step, or load the optimizer's state anew"
                    raise bad_value("state of the optimizer", expected, state["exp_avg"].device, remedy)
                step = state["step"] = state["step"] + 1
                key = at, step, parameter.device, parameter.dtype, gradient.dtype
                batch = batches.get(key)
                if batch is None:
                    kind = BatchKind(parameter.device, parameter.dtype, gradient.dtype, states_dtype)
                    batch = batches[key] = Batch(kind, at, coefficients(group, step))
                batch.parameters.append(parameter)
                batch.exp_avgs.append(state["exp_avg"])
                batch.exp_avg_sqs.append(state["exp_avg_sq"])
                batch.gradients.append(gradient)
                batch.positions.append(position)
                if parameter.dtype == torch.bfloat16:
                    batch.remainders.append(state["remainder"])
        return list(batches.values())

    def _steps_on(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return torch_step
        if self._kernels is None:
            from amoeba.optim.kernel_step import KernelSteps  # needs Triton

            self._kernels = KernelSteps()
        return self._kernels


def _on(device: torch.device, number: Tensor) -> Tensor:
    """Without waiting, but for a number that a GPU computes and the CPU is to use."""
    return number.to(device, non_blocking=device.type == "cuda")


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
            expected = f"a state of AdamW of shape {tuple(parameter.shape)}"
            remedy = "load the state of the same parameters, in the same order"
            raise bad_value(name, expected, tuple(value.shape) if isinstance(value, Tensor) else value, remedy)
    return state


def laid_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or a copy of it that lies in memory as the parameter does, as autograd's own do."""
    if gradient.is_sparse or gradient.dtype not in DTYPES:
        kind = "sparse" if gradient.is_sparse else gradient.dtype
        raise bad_value("gradient", "a dense one in bfloat16 or float32", kind, "use an optimizer of torch.optim")
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


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
