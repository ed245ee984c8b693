"""Sorted rows times expert matrices in e4m3 on Hopper, in Gluon: a scale for each 1 x 128 of a row and 128 x 128 of a
matrix.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    up(x_TH, order_N, K, gate_up_EJH, table, activation, a_NI, h_NJ=h)      # a in e4m3, quantised as it is computed
    multiply(a_NI, down_EHI, table, y_NH)                                   # y[n] = a[n] · down[e]ᵀ, in bf16
    multiply(dy_TH, transposed_down_EIH, table, da_NI, order_N=order_N, top_k=K)     # of gathered rows

The persistent kernel of `amoeba.kernels.hopper.gemm`, with another inside. The matrix unit adds up e4m3 products in
fewer bits than fp32 has, so it starts from zero every 128 of the depth, and threads add its result, times both scales,
to sums in fp32. A warpgroup has 64 rows by 256 columns: their sums take 128 registers a thread, the transient result of
the matrix unit, of one half of the columns after the other, 64. Meanwhile it multiplies for the other warpgroup, which
is why they take turns. Scales are loaded one step ahead, or come with rows.

Widths are multiples of 64, see `fp8_gemm_kernel`. Matrices are stored along the depth, the matrix unit takes e4m3
in no other way: a product with the transposed matrix needs a transposed copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.kernels.activation import constants, fast_kind
from amoeba.kernels.hopper.fp8_gemm_kernel import fp8_gemm_kernel
from amoeba.kernels.hopper.gemm_kernel import Constants
from amoeba.kernels.hopper.tile_order import IN_GROUPS, KEPT_BYTES, TALL, list_tiles
from amoeba.kernels.hopper.tma import descriptor, shared_layout
from amoeba.kernels.launch import cdiv
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.launch.persistent_grid import programs, sharing
from amoeba.precision.quantised import QuantisedMatrix

E4M3 = torch.float8_e4m3fn
# How much of the depth a stage holds, and how many columns share a scale.
BLOCK = 128
# A tile.
BLOCK_M, BLOCK_N = 128, 256
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
ROWS, HALF = (BLOCK_M, BLOCK), (BLOCK_M // 2, BLOCK)
QUARTER = (BLOCK_M // 2, BLOCK // 2)
# Stages of the ring where scales come with rows, and so much of the depth is one turn of it.
MOST_STAGES = 4
TURN = MOST_STAGES * BLOCK


Variant = Literal["in_order", "prefetched", "overlapped", "pingpong", "scales_in_stage"]


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    BLOCK_M: ClassVar[int] = BLOCK_M
    BLOCK_N: ClassVar[int] = BLOCK_N
    BLOCK: ClassVar[int] = BLOCK
    GROUP_M: ClassVar[int] = GROUP_M

    ACTIVATE: bool  # write act(product) in e4m3 instead of the product
    GATHER: bool  # rows are those of tokens, found by order // top_k, instead of sorted ones
    BIAS: bool
    KEEP: bool  # write the product in bf16 as well as what its activation gives
    CODED: bool = False  # what KEEP writes is in e4m3
    CUT: bool = False  # the last block of a width is half full
    APART: bool = False  # gates and ups have blocks of their own
    POWER_OF_TWO: bool = True  # scales of what is written in e4m3 are
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0
    VARIANT: Variant = "in_order"
    ORDER: int = IN_GROUPS  # of tiles, see `amoeba.kernels.hopper.tile_order`

    @property
    def PREFETCHED(self) -> bool:
        """A tile's place, its rows' tokens and its first scales are asked for while the tile before it is stored. The
        threads that gather rows make them visible to the matrix unit, a stage later, instead of those that multiply. A
        warpgroup that has no rows of a tile multiplies nothing."""
        return self.VARIANT == "prefetched"

    @property
    def OVERLAPPED(self) -> bool:
        """Halves of a tile leave under the products that come next, see `fp8_gemm_kernel`."""
        return self.VARIANT in ("overlapped", "pingpong")

    @property
    def SCALES_IN_STAGE(self) -> bool:
        """Scales of gathered rows come with their codes, see `fp8_gemm_scales_in_stage`."""
        return self.VARIANT == "scales_in_stage"

    @property
    def PINGPONG(self) -> bool:
        """Warpgroups start their products alternately (ping-pong), see `fp8_gemm_parts`."""
        return self.VARIANT in ("pingpong", "scales_in_stage")

    @property
    def EARLY(self) -> bool:
        """With scales in stages: the next tile's first product is begun before the end of this one has left. While h
        leaves in bf16 there are no registers for it."""
        return not self.KEEP or self.CODED

    @property
    def TWO_BUFFERS(self) -> bool:
        """h in bf16 is stored through two alternating buffers that take the memory of one."""
        return self.SCALES_IN_STAGE and self.KEEP and not self.CODED

    @property
    def PAIRED(self) -> bool:
        """A tile holds columns of the gate and the same columns of up."""
        return self.ACTIVATE and self.GATED

    @property
    def SHIFTED(self) -> bool:
        """A tile's columns of up may lie in two blocks."""
        return self.PAIRED and self.CUT and not self.APART

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
        return 1 if self.ACTIVATE and not self.TWO_BUFFERS else 2

    @property
    def STAGES(self) -> int:
        """They take up to 224 KB of the 227, together with the buffers."""
        return MOST_STAGES if self.ACTIVATE or self.SCALES_IN_STAGE else 3

    @property
    def REGISTERS(self) -> list[int]:
        """Of the second warpgroup's threads and of those that fill stages, so that neither puts a step's sums aside."""
        return [224, 56] if self.ACTIVATE or self.OVERLAPPED else [216, 72]

    @property
    def STAGED(self) -> tuple[int, int]:
        """As much of the result as leaves at a time."""
        return QUARTER if self.SCALES_IN_STAGE and not self.ACTIVATE else HALF

    @property
    def ROW_LAYOUT(self) -> Any:
        """Of a stage's rows in shared memory."""
        return shared_layout(ROWS, E4M3)

    @property
    def MATRIX_LAYOUT(self) -> Any:
        return shared_layout((BLOCK_N, BLOCK), E4M3)

    @property
    def STAGED_LAYOUT(self) -> Any:
        return shared_layout(self.STAGED, E4M3 if self.ACTIVATE else torch.bfloat16)

    @property
    def KEPT(self) -> tuple[int, int]:
        """As much of h as leaves at a time."""
        return HALF if self.CODED else QUARTER

    @property
    def KEPT_LAYOUT(self) -> Any:
        return shared_layout(self.KEPT, E4M3 if self.CODED else torch.bfloat16)


# Less deep products end too often for alternating warpgroups.
LEAST_PINGPONG = 2048


def variant_of(plan: Plan, depth: int, columns: int) -> Variant:
    """The fastest on an H200 (dev/log, 2026-11-16 and 17); all have the same bits. TFLOP/s at qwen3_30b and dsv3, then
    of others in the same run:

    up, h in bf16     scales_in_stage   1033, 1193      without turns   1018, 1153
    up, h in e4m3     scales_in_stage   1035, 1239      without turns   1033, 1193    in_order (earlier)    924, 1118
    up, h not kept    scales_in_stage   1169, 1296      without turns   1161, 1257    overlapped (earlier) 1053, 1151
    dA'               scales_in_stage   1139, 1282      without turns   1121, 1241
    down              overlapped        1131            pingpong        1084          a depth of 768
    down              pingpong                1272      overlapped            1246    a depth of 2048
    dx                overlapped        1205            pingpong        1189          a depth of 1536
    dx                pingpong                1319      overlapped            1265    a depth of 4096

    Biases and half blocks were not timed so: they keep what they had. So do tiles that are no whole turns of the ring
    of stages, which cannot have scales in stages. An overlapped tile takes two steps or more."""
    timed = not (plan.BIAS or _cut(depth, columns))
    if plan.GATHER and (plan.PAIRED or not plan.ACTIVATE) and timed and depth % TURN == 0:
        return "scales_in_stage"
    if plan.ACTIVATE and plan.KEEP:
        return "in_order"
    if plan.PAIRED and timed:
        return "overlapped" if depth > BLOCK else "in_order"
    if plan.ACTIVATE:
        return "prefetched"
    if plan.GATHER or not timed or depth <= BLOCK:
        return "in_order"
    return "pingpong" if depth >= LEAST_PINGPONG else "overlapped"


def order_of_tiles(plan: Plan, matrix_bytes: int) -> int:
    """Where the GPU is ours alone, see `hopper.tile_order`. matrix_bytes: of an expert. TFLOP/s on an H200 at
    qwen3_30b and dsv3 in tall groups, compared with groups of eight row tiles: dA' 1113, 1220 (1085, 1154), up with h
    in e4m3 1001, 1161 (988, 1128) and without h 1129, 1217 (1122, 1193), but up with h in bf16 1013, 1164 (1029, 1168);
    of sorted rows dx 1188, 1243 (1188, 1225) and down 1115, 1222 (1117, 1215). By columns nothing was faster than
    both."""
    if sharing() != (1, 0) or (plan.KEEP and not plan.CODED):
        return IN_GROUPS
    return TALL if plan.GATHER or matrix_bytes > KEPT_BYTES else IN_GROUPS


# What all widths are multiples of: half a block, so that rows begin where the copy engine can read them.
WIDTH = 64


@cache
def _bound(plan: Plan) -> Any:
    """The kernel for this plan."""
    return fp8_gemm_kernel.bound(PLAN=Constants(plan), num_warps=4)


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
    variant, order = variant_of(plan, depth, columns), order_of_tiles(plan, width * depth)
    kind = plan.KIND if plan.CODED and variant == "in_order" else fast_kind(plan.KIND)
    plan = replace(plan, VARIANT=variant, ORDER=order, KIND=kind)
    fit = rows.shape[1] == depth and out.shape[1] == columns and not (depth % WIDTH or columns % WIDTH)
    fit = fit and not (plan.CODED and plan.PAIRED and plan.CUT) and matrix_EOW.format.block == (BLOCK, BLOCK)
    fit = fit and (matrix_EOW.parts == 1 or plan.APART or not columns % BLOCK)
    given = (rows.data, rows.scales, matrix_EOW.data, matrix_EOW.scales)
    check_arguments(
        fit and all(tensor.is_contiguous() for tensor in given),
        "contiguous numbers and scales, of sizes that are multiples of 64, in blocks of 128",
        rows=rows.data,
        matrix=matrix_EOW.data,
        out=out,
    )
    rows_of_codes = rows.data.view(E4M3)
    matrix = matrix_EOW.data.view(E4M3).view(-1, depth)
    if plan.ORDER > 0:
        table = list_tiles(table, cdiv(columns, plan.COLUMNS), plan.ORDER, BLOCK_M)
    kept = rows_of_codes if h is None else h  # stands for what this plan does not write
    _bound(plan)[(programs(out.device),)](
        descriptor(rows_of_codes, ROWS),
        descriptor(matrix, plan.COPIED, plan.MATRIX_LAYOUT),
        descriptor(kept, ROWS if h is None else plan.KEPT),
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

    The weights are stored (J, H), all gates before all ups, with blocks of their own (`parts`) or counted through both.
    """
    plan = Plan(
        ACTIVATE=True,
        GATHER=True,
        BIAS=bias_EJ is not None,
        KEEP=h_NJ is not None,
        CODED=isinstance(h_NJ, QuantisedMatrix),
        CUT=_cut(x_TH.columns, a_NI.columns),
        APART=gate_up_EJH.parts == 2 and _cut(a_NI.columns),
        POWER_OF_TWO=a_NI.format.power_of_two,
        **constants(activation),  # type: ignore[arg-type]
    )
    h, h_scales = (h_NJ.data.view(E4M3), h_NJ.scales) if isinstance(h_NJ, QuantisedMatrix) else (h_NJ, None)
    codes = a_NI.data.view(E4M3)
    _launch(plan, x_TH, gate_up_EJH, table, codes, a_NI.scales, order_N, top_k, bias_EJ, h, h_scales)
