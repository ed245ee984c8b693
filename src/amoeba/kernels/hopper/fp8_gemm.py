"""Sorted rows times expert matrices in e4m3 on Hopper, in Gluon: a scale for each 1 x 128 of a row and 128 x 128 of a
matrix.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    up(x_TH, order_N, K, gate_up_EJH, table, activation, a_NI, h_NJ=h)      # a in e4m3, quantised as it is computed
    multiply(a_NI, down_EHI, table, y_NH)                                   # y[n] = a[n] · down[e]ᵀ, in bf16
    multiply(dy_TH, turned_down_EIH, table, da_NI, order_N=order_N, top_k=K)     # of gathered rows

The persistent kernel of `amoeba.kernels.hopper.gemm`, with another inside. The matrix unit adds up e4m3 products in
fewer bits than fp32 has, so it starts from zero every 128 of the depth, and threads add its result, times both scales,
to sums in fp32. A warpgroup has 64 rows by 256 columns: their sums take 128 registers a thread, the transient result of
the matrix unit, of one half of the columns after the other, 64. Meanwhile it multiplies for the other warpgroup, which
is why they take turns (`scaled_product_turns`). Scales are loaded one step ahead, or come with rows.

Widths are multiples of 64, see `fp8_gemm_kernel`. Matrices are stored along the depth, the matrix unit takes e4m3
in no other way: a product with the transposed matrix needs a transposed copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.kernels.activation import constants
from amoeba.kernels.hopper.fp8_gemm_kernel import fp8_gemm_kernel
from amoeba.kernels.hopper.gemm_kernel import Constants
from amoeba.kernels.hopper.tile_order import IN_GROUPS, KEPT_BYTES, TALL, list_tiles
from amoeba.kernels.hopper.tma import descriptor, shared_layout
from amoeba.kernels.launch import cdiv
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.launch.persistent_grid import programs, sharing
from amoeba.precision.quantised import QuantisedMatrix

E4M3 = torch.float8_e4m3fn
# A stage holds so much of the depth, and so many columns share a scale.
BLOCK = 128
# A tile.
BLOCK_M, BLOCK_N = 128, 256
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
ROWS, HALF = (BLOCK_M, BLOCK), (BLOCK_M // 2, BLOCK)
QUARTER = (BLOCK_M // 2, BLOCK // 2)
# Stages of the ring where scales come along with rows, and so much of the depth is one turn of it.
ALONG_STAGES = 4
TURN = ALONG_STAGES * BLOCK


class Ways(NamedTuple):
    """How the same bits are computed; `WAYS` has names for some.

    ahead:     a tile's place, its rows' tokens and its first scales are asked for while the tile before it is stored.
    behind:    gathered rows are made visible to the matrix unit by the threads that gather them, so many stages later.
    skips:     a warpgroup that has no rows of a tile multiplies nothing.
    alternate: h in bf16 leaves through two buffers in turns that take the room of one.
    under:     halves of a tile leave under the products that come next, see `scaled_product_under`. `ahead` and `skips`
               are nothing to it.
    in_turns:  warpgroups begin their products one after the other, see `scaled_product_turns`. With `under`.
    along:     scales of gathered rows come with their codes where a tile is whole turns of the ring of stages, see
               `scaled_product_along`. It takes turns; `ahead`, `behind`, `skips` and `under` are nothing to it.
    brisk:     silu by instructions that flush subnormal numbers: 0 for gates below -87 (where it is 1e-36 at most).
    """

    ahead: bool = False
    behind: int = 0
    skips: bool = False
    alternate: bool = False
    brisk: bool = False
    under: bool = False
    in_turns: bool = False
    along: bool = False


PLAIN = Ways()


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    ACTIVATE: bool  # write act(product) in e4m3 instead of the product
    GATHER: bool  # rows are those of tokens, found by order // top_k, instead of sorted ones
    BIAS: bool
    KEEP: bool  # write the product in bf16 as well as what its activation gives
    CODED: bool = False  # what KEEP writes is in e4m3
    CUT: bool = False  # the last block of a width is half full
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0
    WAYS: Ways = PLAIN
    ORDER: int = IN_GROUPS  # of tiles, see `amoeba.kernels.hopper.tile_order`

    @property
    def AHEAD(self) -> bool:
        return self.WAYS.ahead

    @property
    def BEHIND(self) -> int:
        """Of the stages that the producer has begun, the last ones that it has not made visible; 0: consumers do."""
        return self.WAYS.behind if self.GATHER and not self.ALONG else 0

    @property
    def ALONG(self) -> bool:
        """Not for an activation without gates."""
        return self.WAYS.along and self.GATHER and (self.PAIRED or not self.ACTIVATE)

    @property
    def UNDER(self) -> bool:
        """Where it has been faster, or nearly: not with h to write. Where two halves are activated one by one,
        their sums do not all find registers."""
        return self.WAYS.under and (self.PAIRED or not self.ACTIVATE) and not self.KEEP

    @property
    def IN_TURNS(self) -> bool:
        return self.ALONG or (self.UNDER and self.WAYS.in_turns)

    @property
    def EARLY(self) -> bool:
        """Of plans that are ALONG: the next tile's first product is begun before the end of this one has left. While h
        leaves in bf16 there are no registers for it."""
        return not self.KEEP or self.CODED

    @property
    def SKIPS(self) -> bool:
        return self.WAYS.skips

    @property
    def ALTERNATE(self) -> bool:
        return self.WAYS.alternate and self.KEEP and not self.CODED

    @property
    def BRISK(self) -> bool:
        return self.WAYS.brisk and self.KIND == "silu"

    @property
    def FORM(self) -> str:
        """The activation, as `amoeba.kernels.activation` names it."""
        return "fast_silu" if self.BRISK else self.KIND

    @property
    def PAIRED(self) -> bool:
        """A tile holds columns of the gate and the same columns of up."""
        return self.ACTIVATE and self.GATED

    @property
    def SHIFTED(self) -> bool:
        """A tile's columns of up may lie in two blocks."""
        return self.PAIRED and self.CUT

    @property
    def COLUMNS(self) -> int:
        """Columns of the result that a tile holds."""
        return BLOCK if self.PAIRED else BLOCK_N

    @property
    def COPIED(self) -> tuple[int, int]:
        """As much of a matrix as is copied at a time: gate and up come one after the other."""
        return self.COLUMNS, BLOCK

    @property
    def BUFFERS(self) -> int:
        """Of the epilogue, for each warpgroup: with two, one is filled while the copy engine reads the other. It is
        worth a stage where nothing but bf16 is written: 3 % of down and dx, while up loses 8 % (H200, 2026-11-16)."""
        return 1 if self.ACTIVATE and not self.ALTERNATE else 2

    @property
    def STAGES(self) -> int:
        """They take up to 224 KB of the 227, together with the buffers."""
        return ALONG_STAGES if self.ACTIVATE or self.ALONG else 3

    @property
    def REGISTERS(self) -> list[int]:
        """Of the second warpgroup's threads and of those that fill stages, so that neither puts a step's sums aside."""
        return [224, 56] if self.ACTIVATE or self.AHEAD or self.UNDER else [216, 72]

    @property
    def STAGED(self) -> tuple[int, int]:
        """As much of the result as leaves at a time."""
        return QUARTER if self.ALONG and not self.ACTIVATE else HALF


# Ways to compute the same bits, by name. `_measured` has those that are taken.
WAYS = {
    "plain": PLAIN,
    "brisk": Ways(brisk=True),
    "under": Ways(under=True, brisk=True),
    "under in turns": Ways(under=True, in_turns=True, brisk=True),
    "along": Ways(along=True, alternate=True, brisk=True),
    "all": Ways(ahead=True, behind=1, skips=True, alternate=True, brisk=True),
}
# Less deep products end too often for warpgroups in turns.
LEAST_IN_TURNS = 2048
_way: Ways | None = None


def current_way() -> Ways | None:
    """What `way` has named; None: each product's own."""
    return _way


@contextmanager
def way(name: str) -> Iterator[None]:
    """Of the products that are launched inside, in all threads."""
    global _way
    before, _way = _way, WAYS[name]
    try:
        yield
    finally:
        _way = before


def _measured(plan: Plan, depth: int, columns: int) -> Ways:
    """The fastest on an H200 (docs/log.md, 2026-11-16 and 17). TFLOP/s at qwen3_30b and dsv3, then of others in the
    same run:

    up, h in bf16     along             1033, 1193      along before turns    1018, 1153
    up, h in e4m3     along             1035, 1239      without turns         1033, 1193    plain (earlier) 924, 1118
    up, h not kept    along             1169, 1296      without turns         1161, 1257    under (earlier) 1053, 1151
    dA'               along             1139, 1282      without turns         1121, 1241
    down              under             1131            in turns              1084          a depth of 768
    down              under in turns          1272      under                       1246    a depth of 2048
    dx                under             1205            in turns              1189          a depth of 1536
    dx                under in turns          1319      under                       1265    a depth of 4096

    Biases and half blocks have the same bits in other ways, but were not timed so: they keep what they had. So do tiles
    that are no whole turns of the ring of stages, which cannot take `along`."""
    timed = not (plan.BIAS or _cut(depth, columns))
    if plan.GATHER and (plan.PAIRED or not plan.ACTIVATE) and timed and depth % TURN == 0:
        return WAYS["along"]
    if plan.ACTIVATE and plan.KEEP:
        return PLAIN if plan.CODED else WAYS["brisk"]
    if plan.PAIRED and timed:
        return WAYS["under"]
    if plan.ACTIVATE:
        return WAYS["all"]
    if plan.GATHER or not timed:
        return PLAIN
    return WAYS["under in turns" if depth >= LEAST_IN_TURNS else "under"]


def _with_ways(plan: Plan, depth: int, columns: int) -> Plan:
    ways = _measured(plan, depth, columns) if _way is None else _way
    along = ways.along and depth % TURN == 0  # whole turns of the ring of stages
    under = ways.under and depth > BLOCK  # it takes two steps or more
    return replace(plan, WAYS=ways._replace(along=along, under=under))


def order_of_tiles(plan: Plan, matrix_bytes: int) -> int:
    """Where the GPU is ours alone, see `hopper.tile_order`. matrix_bytes: of an expert. TFLOP/s on an H200 at
    qwen3_30b and dsv3 in tall groups, beside those of eight row tiles: dA' 1113, 1220 (1085, 1154), up with h in e4m3
    1001, 1161 (988, 1128) and without h 1129, 1217 (1122, 1193), but up with h in bf16 1013, 1164 (1029, 1168); of
    sorted rows dx 1188, 1243 (1188, 1225) and down 1115, 1222 (1117, 1215). By columns nothing was faster than both."""
    if sharing() != (1, 0) or (plan.KEEP and not plan.CODED):
        return IN_GROUPS
    return TALL if plan.GATHER or matrix_bytes > KEPT_BYTES else IN_GROUPS


# What all widths are multiples of: half a block, so that rows begin where the copy engine can read them.
WIDTH = 64


@cache
def _bound(plan: Plan, out_dtype: torch.dtype) -> Any:
    """The kernel for this plan."""
    return fp8_gemm_kernel.bound(
        PLAN=Constants(plan),
        ROW_LAYOUT=shared_layout(ROWS, E4M3),
        MATRIX_LAYOUT=shared_layout((BLOCK_N, BLOCK), E4M3),
        STAGE_LAYOUT=shared_layout(plan.STAGED, out_dtype),
        KEPT_LAYOUT=shared_layout(HALF, E4M3) if plan.CODED else shared_layout(QUARTER, torch.bfloat16),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK=BLOCK,
        STAGES=plan.STAGES,
        GROUP_M=GROUP_M,
        num_warps=4,
    )


def _launch(
    plan: Plan,
    rows: QuantisedMatrix,
    matrix_EOW: QuantisedMatrix,
    table: Tensor,
    out: Tensor,
    out_scales: Tensor | None,
    order_N: Tensor | None,
    top_k: int,
    bias_EO: Tensor | None,
    h: Tensor | None,
    h_scales: Tensor | None = None,
) -> None:
    _, width, depth = matrix_EOW.shape
    columns = width // 2 if plan.PAIRED else width
    plan = replace(plan, ORDER=order_of_tiles(plan, width * depth))
    fit = rows.shape[1] == depth and out.shape[1] == columns and not (depth % WIDTH or columns % WIDTH)
    fit = fit and not (plan.CODED and plan.SHIFTED)
    given = (rows.data, rows.scales, matrix_EOW.data, matrix_EOW.scales)
    check_arguments(
        fit and all(tensor.is_contiguous() for tensor in given),
        "contiguous codes and scales, of sizes that are multiples of 64",
        rows=rows.data,
        matrix=matrix_EOW.data,
        out=out,
    )
    rows_of_codes = rows.data.view(E4M3)
    matrix = matrix_EOW.data.view(E4M3).view(-1, depth)
    if plan.ORDER > 0:
        table = list_tiles(table, cdiv(columns, plan.COLUMNS), plan.ORDER, BLOCK_M)
    kept = rows_of_codes if h is None else h  # stands for what this plan does not write
    _bound(plan, out.dtype)[(programs(out.device),)](
        descriptor(rows_of_codes, ROWS),
        descriptor(matrix, plan.COPIED, shared_layout((BLOCK_N, BLOCK), E4M3)),
        descriptor(kept, ROWS if h is None else HALF if plan.CODED else QUARTER),
        descriptor(out, plan.STAGED),
        rows_of_codes,
        rows.scales,
        matrix_EOW.scales,
        table if order_N is None else order_N,
        table,
        table if bias_EO is None else bias_EO,
        kept,
        rows.scales if h_scales is None else h_scales,
        out,
        rows.scales if out_scales is None else out_scales,
        depth,
        width,
        columns,
        depth,
        kept.stride(0),
        out.stride(0),
        top_k,
    )


def _cut(*widths: int) -> bool:
    return any(width % BLOCK for width in widths)


def multiply(
    rows_NW: QuantisedMatrix,
    matrix_EOW: QuantisedMatrix,
    table: Tensor,
    out_NO: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
) -> None:
    """out[n] = rows[n] · matrix[e]ᵀ + bias[e], in bf16; with order_N the rows are gathered, rows[order[n] // top_k]."""
    if out_NO.dtype != torch.bfloat16:
        raise bad_value("out_NO", "bfloat16", out_NO.dtype, "these kernels write nothing else")
    gathers, biased = order_N is not None, bias_EO is not None
    cut = gathers and _cut(rows_NW.columns)
    plan = Plan(False, GATHER=gathers, BIAS=biased, KEEP=False, CUT=cut)
    plan = _with_ways(plan, rows_NW.columns, out_NO.shape[1])
    _launch(plan, rows_NW, matrix_EOW, table, out_NO, None, order_N, top_k, bias_EO, None)


def up(
    x_TH: QuantisedMatrix,
    order_N: Tensor,
    top_k: int,
    gate_up_EJH: QuantisedMatrix,
    table: Tensor,
    activation: Activation,
    a_NI: QuantisedMatrix,
    *,
    h_NJ: Tensor | QuantisedMatrix | None = None,
    bias_EJ: Tensor | None = None,
) -> None:
    """h = gathered x · gate_upᵀ + bias, rounded to bf16, and a = act(h), quantised; h is written where it is given, in
    bf16 or, rounded once more, in e4m3 (not where a block holds gates and ups: half of them are in another tile).

    The weights are stored (J, H), all gates before all ups.
    """
    plan = Plan(
        ACTIVATE=True,
        GATHER=True,
        BIAS=bias_EJ is not None,
        KEEP=h_NJ is not None,
        CODED=isinstance(h_NJ, QuantisedMatrix),
        CUT=_cut(x_TH.columns, a_NI.columns),
        **constants(activation),  # type: ignore[arg-type]
    )
    h, h_scales = (h_NJ.data.view(E4M3), h_NJ.scales) if isinstance(h_NJ, QuantisedMatrix) else (h_NJ, None)
    codes = a_NI.data.view(E4M3)
    plan = _with_ways(plan, x_TH.columns, a_NI.columns)
    _launch(plan, x_TH, gate_up_EJH, table, codes, a_NI.scales, order_N, top_k, bias_EJ, h, h_scales)
