"""Kernels run on the GPU where there is one, in Triton's interpreter elsewhere (see tests/support/running.py)."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
