"""For all tests of streaming."""

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads_that_take_turns_quickly() -> Iterator[None]:
    """The host looks again and again, and Python would let the thread that stands for the GPU wait 5 ms each time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes as long for a program that computes two rows of y as for one that computes sixteen."""
    if not torch.cuda.is_available():
        from amoeba.kernels import decode
        from amoeba.kernels.decode import configuration

        monkeypatch.setattr(configuration, "DOWN_ROWS", 16)
        monkeypatch.setattr(decode, "_plans", {})
