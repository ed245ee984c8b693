"""Which versions of Python, torch and others aMoEba has been tested with, and a warning for a newer torch.

    untried("torch", "2.99.0")     # "2.99.0 is newer than 2.15, the newest version that aMoEba was tested with"
    untried("torch", "2.13.0")     # None

Nothing refuses a newer version: most releases change nothing that matters here. `make test-versions` runs a selection
of the tests with the oldest and the newest versions that the package index has.
"""

from __future__ import annotations

import logging
import re

import torch

logger = logging.getLogger("amoeba")

# The oldest and the newest minor version with which the tests have passed; pyproject.toml requires the oldest.
TRIED = {
    "python": ("3.11", "3.14"),
    "torch": ("2.10", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.8", "5.23"),
}


def untried(name: str, version: str | None) -> str | None:
    """What to tell a user whose version is older or newer than those in TRIED; None if there is nothing to tell."""
    if version is None or name not in TRIED or not (found := _minor(version)):
        return None
    oldest, newest = TRIED[name]
    if found > _minor(newest):
        return f"{version} is newer than {newest}, the newest version that aMoEba was tested with"
    if found < _minor(oldest):
        return f"{version} is older than {oldest}, the oldest version that aMoEba was tested with"
    return None


def warn_about_torch() -> None:
    """One line in the log. Only for torch: transformers releases a minor version every few weeks."""
    told = untried("torch", str(torch.__version__))
    if told is not None:
        logger.warning("torch %s; `amoeba verify` checks the results on this machine", told)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
