"""How torch's threads wait for each other: spinning, or giving their core away. OpenMP reads it once, with torch.

On a busy machine a step is up to several times faster where they do not spin (dev/log), so importing amoeba
before torch sets that, in a script as in a command. What the user has set stays.
"""

from __future__ import annotations

import os
import sys

_NAME = "OMP_WAIT_POLICY"
_set_here = False


def wait_passively() -> None:
    global _set_here
    if "torch" not in sys.modules and _NAME not in os.environ:
        os.environ[_NAME], _set_here = "passive", True


def wait_as_torch_does() -> None:
    """Takes back what `wait_passively` set: for measurements, which should see what others see."""
    if _set_here and "torch" not in sys.modules:
        os.environ.pop(_NAME, None)
