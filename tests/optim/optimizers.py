"""Small trainings for the tests of the optimizer, by torch's operations or by the kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amoeba.optim import AdamW

# a tile that is full, one that is not, less than 16 bytes, no element, more than a chunk
SHAPES = ((2, 512), (3, 347), (5,), (0, 4), (), (16500,))


def by_kernels(optimizer: AdamW) -> AdamW:
    """The same optimizer, which computes with Triton's kernels wherever its parameters are."""
    from amoeba.optim.kernel_step import KernelSteps

    kernels = KernelSteps()
    optimizer._steps_on = lambda device: kernels  # type: ignore[method-assign]
    return optimizer


def parameters(dtype: torch.dtype, device: str = "cpu", shapes: Any = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]


def gradients(like: list[Parameter], steps: int, seed: int = 2) -> Iterator[list[Tensor]]:
    """bf16 numbers, so that they are the same whatever they are stored in; of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        sizes = [10.0 ** torch.randint(-6, 2, parameter.shape, generator=generator) for parameter in like]
        normal = [torch.randn(parameter.shape, generator=generator) for parameter in like]
        yield [(a * b).bfloat16() for a, b in zip(sizes, normal, strict=True)]


def set_gradients(of: list[Parameter], values: list[Tensor], dtype: torch.dtype | None = None) -> None:
    for parameter, value in zip(of, values, strict=True):
        parameter.grad = value.to(parameter.device, dtype or parameter.dtype)


def train(optimizer: Any, of: list[Parameter], steps: int, seed: int = 2, max_norm: float | None = None) -> None:
    for values in gradients(of, steps, seed):
        set_gradients(of, values)
        if max_norm is not None and isinstance(optimizer, AdamW):
            optimizer.note_clipping(max_norm)
        elif max_norm is not None:
            torch.nn.utils.clip_grad_norm_(of, max_norm)
        optimizer.step()


def groups(of: list[Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": of[:2], "lr": 3e-3, "weight_decay": 0.1},
        {"params": of[2:4], "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": of[4:], "eps": 1e-5},
    ]


def everything(optimizer: AdamW) -> list[Tensor]:
    """Parameters and states, to be compared."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            found += [parameter.detach(), *(state[name] for name in sorted(state) if name != "step")]
    return found


def same(a: AdamW, b: AdamW) -> bool:
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(everything(a), everything(b), strict=True))
