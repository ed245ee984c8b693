"""For all tests of streaming."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def threads_that_take_turns_quickly() -> Iterator[None]:
    """The host looks again and again, and Python would let the thread that stands for the GPU wait 5 ms each time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)
