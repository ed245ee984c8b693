"""Bytes as people write them: 8GiB, 512MiB, 32GB.

parse_size("--vram", "8GiB")     # 8589934592
show_size(8589934592)            # "8 GiB"
"""

from __future__ import annotations

import math
import re

from amoeba.core.errors import bad_value

_UNITS = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """name: of the option, for the error."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise bad_value(name, "a size in bytes", repr(text), "write for example 8GiB, 512MiB or 32GB")
    return math.floor(float(found[1]) * unit)


def show_size(count: float) -> str:
    """Four digits at most, rounded up: what is said to be enough is."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            digits = max(0, 3 - len(str(int(count / size))))
            return f"{math.ceil(count / size * 10**digits) / 10**digits:g} {unit}"
    return f"{math.ceil(count)} B"
