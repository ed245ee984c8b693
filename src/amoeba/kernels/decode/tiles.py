"""What the kernels for few tokens share: tiles of weights, and the activation of a tile.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

ACTIVATION is `amoeba.kernels.activation.group`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.kernels import activation as activations


@triton.jit
def product_alone(left, right):
    """left · right, rounded by itself. Else the compiler makes it a part of the first addition across lanes, where each
    lane adds the rounded product of the other one to its own: lanes then hold one sum that differs in its last bit."""
    return left * right + 0.0


@triton.jit
def load_tile(pointers, row_ok, depth_ok, EVEN_ROWS: tl.constexpr, EVEN_DEPTH: tl.constexpr, POLICY: tl.constexpr):
    """A tile with zeros where there is nothing; without masks where there is nothing to mask."""
    if EVEN_ROWS and EVEN_DEPTH:
        tile = tl.load(pointers, eviction_policy=POLICY)
    elif EVEN_ROWS:
        tile = tl.load(pointers, mask=depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    elif EVEN_DEPTH:
        tile = tl.load(pointers, mask=row_ok[:, None], other=0.0, eviction_policy=POLICY)
    else:
        tile = tl.load(pointers, mask=row_ok[:, None] & depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def rows_of_gate_up(first, I, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The rows of W1 that make columns first .. first + COLUMNS of a, and which of them exist."""
    if ACTIVATION.GATED:
        row = tl.arange(0, 2 * COLUMNS)
        if ACTIVATION.INTERLEAVED:
            column = first + row // 2
            j = 2 * first + row
        else:
            column = first + row % COLUMNS
            j = column + (row // COLUMNS) * I
    else:
        column = first + tl.arange(0, COLUMNS)
        j = column
    return j, column < I


@triton.jit
def activate(h, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    """a (COLUMNS, ROWS) of h whose rows are in the order of `rows_of_gate_up`."""
    if ACTIVATION.GATED:
        if ACTIVATION.INTERLEAVED:
            pairs = tl.permute(tl.reshape(h, (COLUMNS, 2, ROWS)), (0, 2, 1))
        else:
            pairs = tl.permute(tl.reshape(h, (2, COLUMNS, ROWS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        a = activations.gated_by(gate, up, ACTIVATION)
    else:
        a = activations.plain_by(h, ACTIVATION)
    return a
