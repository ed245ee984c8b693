"""The producer of the kernel for Hopper where tasks come from a list: `amoeba.tasks.listing`.

See `amoeba.tasks.hopper_kernel`. Between two tasks the ring of stages lasts for two microseconds. To find out what a
ticket is, to look at its gate and to ask for its first rows takes longer than that, one after the other, in the
warpgroup that fills the stages. Here a task's line of the list is on its way while the stages of the one before it are
filled, and each thread looks at the gate by itself, without an atomic that is handed around.

Threads that gather rows and the copy engine write the same ring by two ways, and a fence has to join them. One a task
is enough. Without it the compiler has one in each stage, which waits for the rows that are on their way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from amoeba.tasks.decoder import COMBINE, count_tickets
from amoeba.tasks.hopper_fill import fill_task
from amoeba.tasks.hopper_queue import STOP, draw, drawn_ticket, look, pass_on, wait_for_tokens


@gluon.jit
def _line(records, ticket, total):
    """The eight numbers of a task; behind the last one, the last one's again."""
    at = records + gl.minimum(ticket, total - 1).to(gl.int64) * 8
    four: gl.constexpr = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    kind, item, part, expert = gl.inline_asm_elementwise(
        four, "=r,=r,=r,=r,l", [at], (gl.int32, gl.int32, gl.int32, gl.int32), False, 1
    )
    row, end, gate, least = gl.inline_asm_elementwise(
        four, "=r,=r,=r,=r,l", [at + 4], (gl.int32, gl.int32, gl.int32, gl.int32), False, 1
    )
    return kind, item, part, expert, row, end, gate, least


@gluon.jit
def produce_listed(
    descriptors, sources, maps, counters, queue, ring, tokens, rows, intermediate, bundle, PLAN: gl.constexpr
):
    """Draws tickets, waits at gates, passes tasks on and fills their stages."""
    _, _, _, _, expert_TK = sources
    order, slot_row, offs_E, heaviest_E, records = maps
    first_tile = heaviest_E + PLAN.EXPERTS  # see `make_table`
    place_E = first_tile + PLAN.EXPERTS + 1
    row_counters = counters + PLAN.ROW_COUNTERS
    token_blocks = gl.cdiv(tokens, PLAN.TOKENS)
    total = count_tickets(
        first_tile, PLAN.EXPERTS, PLAN.TN, PLAN.TNX, gl.cdiv(PLAN.DOWN_TILES, bundle), gl.cdiv(PLAN.UP_TILES, bundle),
        token_blocks,
    )  # fmt: skip
    count = 0
    passed = 0
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    line = _line(records, ticket, total)
    while ticket < total:
        drawn = draw(counters, tokens)
        kind, item, part, expert, row, end, gate, least = line
        if kind == COMBINE:
            wait_for_tokens(item, expert_TK, slot_row, offs_E, place_E, first_tile, row_counters, tokens, rows, PLAN)
        elif least > 0:
            look(counters + gate, least)
        passed = pass_on(queue, passed, kind, item, part, expert, row, end, ticket)
        fence_async_shared()  # see above
        ticket = drawn_ticket(drawn)
        line = _line(records, ticket, total)
        count = fill_task(
            descriptors, sources, order, slot_row, ring, count, kind, item, part, expert, row, end, tokens, rows,
            intermediate, bundle, PLAN,
        )  # fmt: skip
    pass_on(queue, passed, STOP, 0, 0, 0, 0, 0, 0)
