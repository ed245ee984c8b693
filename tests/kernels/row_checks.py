"""What the tests of the row passes share: numbers, the distance to them, and how large it may be."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sums in fp32, rounded once. The interpreter truncates to bf16 where a GPU rounds, which costs 4.3e-3.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}


def error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; NaN, which is below no tolerance, where `got` holds one."""
    assert got.shape == expected.shape
    got, expected = got.detach(), expected.detach()
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)
