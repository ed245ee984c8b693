"""Which decode kernel runs for few tokens with quantised experts, and the tiles of each launch.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate

    chosen = configuration_of(problem)          # of QuantisedExperts
"""

from __future__ import annotations

from amoeba.core.problem import Problem
from amoeba.kernels.blocks import NARROWEST, columns_together
from amoeba.kernels.decode import one_token
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
from amoeba.kernels.decode.low_rank import ranks_of
from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.precision.formats import E4M3, FP8_128, MXFP4, NVFP4, Format
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
# Layers from this H on have other tiles, found with H=4096 I=14336 E=8 K=2 and H=7168 I=2048 E=64 K=8 on an H200
# (dev/log). By slot, one token, us: fp8 with four columns of up in four warps 110 and 110 for 120 and 119, and half as
# many rows of down in a step 116 for 120 with the first. MXFP4 with four columns of down in steps of 2048 120 for 141
# with the first, and with two columns in four warps 120 for 127 with the second, whose rows have fewer bytes.
LARGE_HIDDEN, LARGE_UP_COLUMNS, LARGE_WARPS = 4096, 4, 4
LARGE_IN_STEPS, LARGE_STEP_COLUMNS, LARGE_STEP, LARGE_COLUMNS = 8192, 4, 2048, 2
# Where `one_token` serves: rows of weights in a program of up and columns of y in one of down, chunks of a row that a
# lane of up has at once, by preference, and at most, by bits; of down likewise. One token of the layer above in us, by
# these kernels and by the others: MXFP4 13.0 and 16.3, fp8 12.2 and 15.9, NVFP4 13.4 and 16.8 (dev/log).
CHUNK_ROWS, CHUNK_COLUMNS, CHUNK_WARPS, MOST_DOWN_WARPS = 4, 4, 4, {8: 8, 4: 4}
UP_PIECES, MOST_UP_PIECES = 2, {8: 4, 4: 3}
DOWN_PIECES, MOST_DOWN_PIECES = 3, {8: 4, 4: 3}
# A row that is too long for that is read in steps of one piece, while the next one is on its way. Columns of down with
# them, by bits: 27.6 us with eight for 30.4 with four and two pieces (fp8, the first layer of LARGE_HIDDEN). Up of four
# bits has steps of a warp, and twice the rows, where more than this share of the lanes would have no part of a row that
# is longer than they are many: the second layer takes 50.6 us for 56.0, and its down 27.9 for 31.9 in eight warps.
STEP_COLUMNS, MOST_IDLE = {8: 8, 4: 4}, 1 / 8
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
# Nor of MXFP4 with large layers: 455 us for 579 with the first one of LARGE_HIDDEN at 64 tokens, 892 for 919 with the
# second one at 128, which takes 735 with tiles twice as tall (the first one 486 for 452). With FEWEST_SLOTS together,
# MXFP4 steps twice as long where slots are more than experts (274 us for 291 at 8 tokens with the first one; 356 for
# 354 with the second one, which has as many slots as experts), and fp8 has twice the warps (315 for 349, 476 for 495).
SHORT_ROWS, TALL_HIDDEN = 32, 7168
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
# Where rows are quantised as well both operands are read from shared memory as they are, by the instruction for 64 rows
# and 16 slots or more. Stages by slots in a chunk: with 16 five take 702 us for 714 (8 slots of each expert of the
# second layer of LARGE_HIDDEN), with 32 four 377 for 380 (16 of each of the first). Chunks of 64 take 549 and spill;
# tiles of half the rows 459, of twice 405, twice the warps 436.
MOST_SLOTS_E4M3, ROWS_E4M3, WARPS_E4M3, STAGES_E4M3 = 32, 128, 4, {16: 5, 32: 4}
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
    if weights.hidden >= LARGE_HIDDEN:
        up, down = _large(up, down, up_format, down_format, bytes_of_slots)
    ranks = ranks_of(problem.lora)
    if not ranks.any_up and one_token.serves(problem, weights.gate_up_EJH):
        up = up_in_chunks(problem)
    if ranks.down == 0 and one_token.serves(problem, weights.down_EHI):
        down = down_in_chunks(problem)
    return Configuration(
        by_slot=True,
        up=up,
        down=down,
        overlap=can_overlap(problem.x_TH.device),
    )


def _large(up: Tile, down: Tile, up_format: Format, down_format: Format, bytes_of_slots: int) -> tuple[Tile, Tile]:
    if up_format.element is E4M3:
        up = up._replace(columns=LARGE_UP_COLUMNS, warps=LARGE_WARPS)
    if down_format.element is E4M3 and not down.at_once:
        down = down._replace(columns=max(down.columns // 2, 1))
    if down_format is MXFP4 and down.at_once:
        if bytes_of_slots > LARGE_IN_STEPS:
            down = Tile(LARGE_STEP_COLUMNS, LARGE_STEP, LARGE_WARPS, STEP_STAGES)
        else:
            down = down._replace(columns=LARGE_COLUMNS, warps=LARGE_WARPS)
    return up, down


def up_in_chunks(problem: Problem) -> Tile:
    """For `one_token`: warps side by side in a row, each lane with all rows of the program."""
    weights: QuantisedExperts = problem.weights
    kept, bits = weights.gate_up_EJH.matrix, weights.format.element.bits
    length, lanes, rows = one_token.chunks_of_row(kept), CHUNK_WARPS * one_token.LANES, CHUNK_ROWS
    chunks, pieces = _pieces(length, UP_PIECES, MOST_UP_PIECES[bits], lanes) or (lanes, 1)
    if bits == 4 and length > lanes and (chunks * pieces < length or chunks * pieces > (1 + MOST_IDLE) * length):
        chunks, pieces, rows = one_token.LANES, 1, 2 * CHUNK_ROWS
    columns = _dividing(rows // (2 if weights.activation.gated else 1), weights.intermediate)
    return one_token.tile(kept, columns, chunks, pieces, max(chunks // one_token.LANES, 1))


def down_in_chunks(problem: Problem) -> Tile:
    """The same of all slots of a token, and where that leaves warps, of the program's columns."""
    weights: QuantisedExperts = problem.weights
    kept, slots = weights.down_EHI.matrix, next_power_of_2(problem.expert_TK.shape[1])
    bits = kept.format.element.bits
    lanes = max(MOST_DOWN_WARPS[bits] * one_token.LANES // slots, 1)
    found = _pieces(one_token.chunks_of_row(kept), DOWN_PIECES, MOST_DOWN_PIECES[bits], lanes)
    chunks, pieces = found or (max(CHUNK_WARPS * one_token.LANES // slots, 1), 1)
    columns = _dividing(CHUNK_COLUMNS if found else STEP_COLUMNS[bits], weights.hidden)
    warps = max(min(CHUNK_WARPS, slots * chunks * columns // one_token.LANES), slots * chunks // one_token.LANES, 1)
    return one_token.tile(kept, columns, chunks, pieces, warps)


def _pieces(length: int, wanted: int, most: int, lanes: int) -> tuple[int, int] | None:
    """Into how many pieces of how many chunks a row of `length` is cut, of a power of two: those that leave the least
    of the last one empty, of these as near to `wanted` as can be. None where there would be more than `most`."""
    widths = [1 << doublings for doublings in range(lanes.bit_length())]
    found = [(width, cdiv(length, width)) for width in widths if cdiv(length, width) <= most]
    return min(found, key=lambda each: (each[0] * each[1], abs(each[1] - wanted)), default=None)


def _dividing(most: int, length: int) -> int:
    while length % most:
        most //= 2
    return most


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
    large = weights.hidden >= LARGE_HIDDEN
    if rows >= SHORT_ROWS and (bits < 8 or weights.format.block[1] < depth) and not (large and weights.format is MXFP4):
        depth //= 2
    if weights.format is MXFP4 and rows >= SHORT_ROWS and weights.hidden >= TALL_HIDDEN:
        height *= 2
    if large and weights.format is FP8_128 and rows == FEWEST_SLOTS and slots >= experts:
        warps *= 2
    longer = large and weights.format is MXFP4 and rows == FEWEST_SLOTS and slots > experts
    if longer:
        depth *= 2
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
        up = up._replace(depth=LONG_STEP * (2 if longer else 1))
    early = overlap and slots < experts and tokens <= MOST_EARLY and weights.format is not NVFP4
    return Configuration(False, up, down, rows, overlap, BY_LANES[bits], listed, early)


def in_e4m3(problem: Problem) -> Configuration:
    """By expert, with quantised rows."""
    weights: QuantisedExperts = problem.weights
    rows = slots_together(problem.rows, weights.num_experts, SMALLEST_CHUNK, MOST_SLOTS_E4M3)
    overlap = can_overlap(problem.x_TH.device)
    listed = problem.rows >= (FEWEST_LISTED if overlap else FEWEST_LISTED_ALONE)
    up, down = (
        Tile(ROWS_E4M3 // of_column, FP8_128.block[1], WARPS_E4M3, STAGES_E4M3[rows])
        for of_column in (2 if weights.activation.gated else 1, 1)
    )
    return Configuration(False, up, down, rows, overlap, listed=listed, e4m3=True)


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
