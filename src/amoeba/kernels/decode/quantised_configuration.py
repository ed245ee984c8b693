"""Which decode kernel runs for few tokens with quantised experts, and the tiles of each launch.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate

    chosen = configuration_of(problem)          # of QuantisedExperts
"""

from __future__ import annotations

from amoeba.core.problem import Problem
from amoeba.kernels.blocks import NARROWEST, columns_together
from amoeba.kernels.decode.configuration import (
    FEWEST_LISTED,
    SMALLEST_CHUNK,
    Configuration,
    Like,
    Tile,
    can_overlap,
    goes_by_slot,
    slots_together,
)
from amoeba.kernels.launch import next_power_of_2
from amoeba.precision.formats import MXFP4, NVFP4, Format
from amoeba.precision.quantised_experts import QuantisedExperts

# By slot, by the bits of a number: bytes of weights that a program of the up projection has in flight, and the warps of
# both products. What was fastest of eleven ways at qwen3's sizes (E=128 K=8 H=2048 I=768) on an H200: dev/log.
# NVFP4 has twice the scales to make: 16.9 us for one token with four warps, 19.4 with two.
UP_BYTES, WARPS_BY_SLOT, WARPS_NVFP4 = {8: 8192, 4: 4096}, {8: 4, 4: 2}, 4
DOWN_BYTES = 8192
# Bytes of one row of every slot from which on the down projection reads in steps: a program reads `a` of all slots as
# well, which is as many bytes or more, unless it has several rows of each. Rows and bytes of them in a step, warps,
# stages.
IN_STEPS, STEP_ROWS, STEP_BYTES, STEP_WARPS, STEP_STAGES = 16384, 16, 1024, 4, 4
WIDEST_PIECE, NARROWEST_PIECE = 2048, 256  # of a row, in numbers
# By expert: slots of one that are computed together, at least and at most, rows of weights in a tile, and warps. One
# or two warps take the tensor core's instruction for small tiles, whose left operand is in registers; four would take
# the one for 64 rows. Of fifteen ways the fastest at 64 tokens; where few experts are touched, tiles are half as high.
FEWEST_SLOTS, MOST_SLOTS, WEIGHT_ROWS, WARPS = 8, 32, 64, 2
# By the bits of a number: bytes of a row in a step, stages, and the order of four-bit ones (`Configuration.by_lanes`),
# which takes 0.70 of the integer instructions: 138 us at 64 tokens where pairs of neighbours take 166 (dev/log).
# That order needs one or two warps: with four, Triton 3.6 pairs numbers with the wrong ones of the rows.
DEPTH_BYTES, STAGES, BY_LANES = {8: 128, 4: 64}, {8: 4, 4: 3}, {8: False, 4: True}
# Slots together from which on steps have half that length: both operands take registers. Not where a step lies in one
# block, whose scale is applied to what it gives: of fp8-128 up and down take 216 us in place of 268 at 256 tokens of
# that layer (dev/log).
SHORT_ROWS = 32
# Slots from which on a launch of its own lists them where no other launch hides it: only where programs would have many
# ids to look at, each all of them. Not timed.
FEWEST_LISTED_ALONE = 1024
# Tokens up to which up's programs list slots for down's (`Configuration.early`), where slots are fewer than experts:
# at 8 tokens of that layer fp8 takes 75.4 us in place of 77.3, MXFP4 1 % less. MXFP8 was not timed. With 12 tokens and
# more it was slower in most cases, and NVFP4's long steps leave up no registers for it (dev/log).
MOST_EARLY = 8
# Numbers of a row in a step of up, of MXFP4 and with FEWEST_SLOTS in a chunk: 62 us in place of the 68 that steps of
# 128 take at 8 tokens of that layer, 85 for 92 at 16, and 113 for 128 at 64 (dev/log). Of NVFP4 72 for 83 at 8
# tokens, and where slots are listed: at 64, up takes 87 us in place of 103.
LONG_STEP = 256
# Of blocks of GGUF files those of 256 numbers are taken as a whole, by programs of 32 rows: Q4_K takes 92 us at 8
# tokens of that layer and 182 at 64, where steps of 64 numbers took 269 and 512 (dev/log/gguf.md). Where high bits are
# apart, two warps share the rows, or threads put numbers aside. By slot a warp has as many numbers of up in flight, in
# pieces of a row, or one row of y. Others are read two bytes at a time: half the numbers of fp8 in a step.
WHOLE_BLOCK, WHOLE_ROWS, WHOLE_STAGES = 256, 32, 2
WHOLE_NUMBERS, WHOLE_PIECE = 8192, 1024
IN_BLOCKS = 2
SHORTEST_STEP = 64  # numbers; with less than 32 in it Triton 3.6 multiplies wrongly what was unpacked


def configuration_of(problem: Problem, like: Like | None = None) -> Configuration:
    tokens, experts = like or _own(problem)
    if goes_by_slot(tokens, problem.expert_TK.shape[1], experts):
        return by_slot(problem)
    return by_expert(problem, like)


def _own(problem: Problem) -> Like:
    return Like(problem.expert_TK.shape[0], problem.weights.num_experts)


def by_slot(problem: Problem) -> Configuration:
    weights: QuantisedExperts = problem.weights
    up_format, down_format = weights.format, weights.down_format or weights.format
    bits, rows = weights.format.element.bits, 2 if weights.activation.gated else 1
    share, warps = IN_BLOCKS if up_format.scale == "inside" else 1, WARPS_BY_SLOT[bits]
    if up_format is NVFP4:
        warps = WARPS_NVFP4
    least_up, least_down = _least_step(up_format), _least_step(down_format)
    up_depth = _piece(weights.hidden, WIDEST_PIECE, least_up)
    down_depth = _piece(weights.intermediate, NARROWEST_PIECE, least_down)  # each piece also reads the `a` of all slots
    columns = max(UP_BYTES[bits] // share * 8 // (rows * bits * next_power_of_2(weights.hidden)), 1)
    slots = next_power_of_2(problem.expert_TK.shape[1])
    bytes_of_slots = slots * bits * weights.intermediate // 8
    if bytes_of_slots > IN_STEPS // share:
        down_depth = _piece(weights.intermediate, STEP_BYTES // share**2 * 8 // bits, least_down)
        down = Tile(max(STEP_ROWS // slots, 1), down_depth, STEP_WARPS, STEP_STAGES)
    else:
        lines = _power_of_2_below(max(DOWN_BYTES // bytes_of_slots, 1), 4)
        down = Tile(lines, down_depth, warps, at_once=True)
    up = Tile(_power_of_2_below(columns, 16), up_depth, warps, at_once=True)
    if _is_whole(up_format):
        of_column = rows * next_power_of_2(weights.hidden)
        columns, warps = max(WHOLE_NUMBERS // of_column, 1), max(of_column // WHOLE_NUMBERS, 1)
        up = Tile(min(columns, 16), _piece(weights.hidden, WHOLE_PIECE, least_up), min(warps, 8), at_once=True)
    if _is_whole(down_format) and down.at_once:
        down = Tile(1, down_depth, 1, at_once=True)
    return Configuration(
        by_slot=True,
        up=up,
        down=down,
        overlap=can_overlap(problem.x_TH.device),
    )


def by_expert(problem: Problem, like: Like | None = None) -> Configuration:
    weights: QuantisedExperts = problem.weights
    tokens, experts = like or _own(problem)
    slots = tokens * problem.expert_TK.shape[1]
    rows, height, warps = slots_together(slots, experts, FEWEST_SLOTS, MOST_SLOTS), WEIGHT_ROWS, WARPS
    if slots < experts:  # more programs for the few experts
        height, warps = height // 2, warps // 2
    bits = weights.format.element.bits
    depth = DEPTH_BYTES[bits] * 8 // bits
    if weights.format.scale == "inside":
        depth, height = depth // IN_BLOCKS, height // (IN_BLOCKS if rows >= SHORT_ROWS else 1)
    if rows >= SHORT_ROWS and (bits < 8 or weights.format.block[1] < depth):
        depth //= 2
    if problem.x_TH.element_size() > 2:  # no tensor core has fp32: all of a tile is in registers at once
        rows, height, warps, depth = SMALLEST_CHUNK, WEIGHT_ROWS // 2, 2 * WARPS, SHORTEST_STEP

    def tile(width: int, rows_of_column: int, reduction: int, format: Format) -> Tile:
        whole = _is_whole(format) and problem.x_TH.element_size() == 2
        columns = min((WHOLE_ROWS if whole else height) // rows_of_column, max(next_power_of_2(width), 16))
        if whole:
            shared = format.name in ("q3_k", "q5_k", "q6_k") or rows >= SHORT_ROWS
            return Tile(columns, WHOLE_BLOCK, 2 if shared else 1, WHOLE_STAGES)
        least = max(_least_step(format), SHORTEST_STEP)
        return Tile(columns, max(min(depth, next_power_of_2(reduction)), least), warps, STAGES[bits])

    up = tile(weights.intermediate, 2 if weights.activation.gated else 1, weights.hidden, weights.format)
    down = tile(weights.hidden, 1, weights.intermediate, weights.down_format or weights.format)
    overlap = can_overlap(problem.x_TH.device)
    listed = slots >= (FEWEST_LISTED if overlap else FEWEST_LISTED_ALONE)  # where a launch more costs little
    takes_long = weights.format is MXFP4 or (weights.format is NVFP4 and (listed or slots < experts))
    if takes_long and rows == FEWEST_SLOTS and weights.hidden >= LONG_STEP:
        up = up._replace(depth=LONG_STEP)
    early = overlap and slots < experts and tokens <= MOST_EARLY and weights.format is not NVFP4
    return Configuration(False, up, down, rows, overlap, BY_LANES[bits], listed, early)


def _is_whole(format: Format) -> bool:
    return format.scale == "inside" and format.block[1] == WHOLE_BLOCK


def _least_step(format: Format) -> int:
    """Numbers of a row that are loaded together, at least."""
    return columns_together(format.name) if format.scale == "inside" else NARROWEST


def _piece(length: int, widest: int, least: int) -> int:
    """The power of two that leaves the least of its last repetition empty; of those, the widest."""
    widest = min(max(widest, least), max(next_power_of_2(length), least))
    widths = [widest >> halvings for halvings in range(4) if widest >> halvings >= min(NARROWEST_PIECE, widest)]
    return min(widths, key=lambda width: -(-length // width) * width)


def _power_of_2_below(number: int, most: int) -> int:
    return min(1 << (number.bit_length() - 1), most)
