"""Rows of blocks of any bits, whose scales are finite."""

import numpy as np

from amoeba.precision.blocks import BLOCK_KINDS

HALVES = {
    "q6_k": [208],
    "q3_k": [108],
    "q2_k": [80, 82],
    "q8_0": [0],
    "q5_0": [0],
    "q4_0": [0],
    "mxfp4": [],
    "nf4": [2],
}


def random_rows(kind: str, rows: int = 8, blocks: int = 3) -> np.ndarray:
    found = np.random.default_rng(0).integers(0, 256, (rows, blocks, BLOCK_KINDS[kind].bytes), dtype=np.uint8)
    for place in HALVES.get(kind, [0, 2]):
        found[..., place + 1] &= 0xBB  # an exponent of fp16, or of fp32, that is not all ones
    if kind == "mxfp4":
        found[..., 0] = np.minimum(found[..., 0], 251)
    return found.reshape(rows, -1)
