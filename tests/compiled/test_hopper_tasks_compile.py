"""The scheduled backward in Gluon compiles for Hopper, here without one: what it waits for, and how it fits.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

In a process of its own, this file as a program: see tests/compiled/test_hopper_compiles.py.
"""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from compiling import SHARED_BYTES, compile_as, compiled_by, figures, told_by
from test_hopper_compiles import CompileOnly

pytestmark = pytest.mark.thorough  # compiles for half a minute

SHAPES = {"qwen3_30b": (2048, 768, 128, 8), "olmoe": (2048, 1024, 64, 8)}
COMPILED = (*SHAPES, "small", "biases")  # the last two: qwen3_30b's sizes, as of a layer with few rows; with biases
# What a thread may keep in memory between two tasks: predicates and addresses that are found once. Never a sum: Triton
# 3.9 fetches one such number again in each step of a product, in three of the four loops, 3.6 none, or with biases one.
MOST_STACK = 96


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"), *COMPILED)


@pytest.mark.parametrize("name", COMPILED)
def test_it_fits_and_products_keep_all_in_registers(found, name):
    of_shape = found[name]
    assert of_shape["wgmma"] == 16  # four products of 16 in a stage: products and gradients, of two warpgroups
    assert SHARED_BYTES // 2 < of_shape["shared"] <= SHARED_BYTES
    assert of_shape["stack_bytes"] <= MOST_STACK
    assert of_shape["loops"] == 4 and of_shape["local_in_loops"] <= 4


@pytest.mark.parametrize("name", COMPILED)
def test_stores_arrive_before_the_signal_and_loads_follow_it(found, name):
    """Of each: the bulk stores complete, the fence between the two ways to memory, all threads, the release; the
    acquire, all threads, the fence. No test on one machine would fail for sure without them."""
    order = found[name]["order"]
    # row tile, and after a row pass the expert
    signals = re.findall(r"arrived fence barrier (?:\w+ )*?release", order)
    assert len(signals) >= 2 and len(signals) == order.count("arrived")
    assert order.count("release") == 2 * order.count("arrived")
    waits = re.findall(r"acquire (?:barrier |acquire )+fence", order)
    assert 1 <= len(waits) <= 2  # of tasks of the list, and of tokens; the compiler may let their ends be one
    # of each one, and one in its loop; of a block of tokens a thread looks for two slots
    assert sum(wait.count("acquire") for wait in waits) == order.count("acquire") == 2 * (1 + 2)
    assert order.count("fence") == len(signals) + len(waits)


def test_the_next_ticket_is_not_waited_for_where_it_is_drawn(found):
    """The compiler takes an atomic that all threads of a warp do as one, and hands its result around at once."""
    assert min(found[name]["drawn_waits"] for name in COMPILED) > 40 > found["over ranks"]["drawn_waits"]


def test_gathered_rows_need_one_fence_a_task_not_one_a_stage(found):
    """A fence waits for what was gathered. Left is one for an expert's last rows, in the loops of gradients."""
    for name in COMPILED:
        assert set(found[name]["fences_among_gathers"]) == {0, 1}, name
    assert set(found["over ranks"]["fences_among_gathers"]) == {1, 2}


def test_over_ranks_rows_go_16_bytes_at_a_time_and_flags_come_behind_them(found):
    over_ranks = found["over ranks"]
    assert over_ranks["stack_bytes"] <= MOST_STACK + 32 and over_ranks["shared"] <= SHARED_BYTES
    assert over_ranks["local_in_loops"] <= 3
    assert re.search(r"load16 (load16 )*store16 (store16 )*(barrier )+raise", over_ranks["sends"]), over_ranks["sends"]
    assert over_ranks["sends"].count("raise") == 2  # of two warpgroups
    assert over_ranks["sends"].count("look") >= 4  # what was taken, rows of a product, rows of a block of tokens
    assert not re.search("raise|look", found["qwen3_30b"]["sends"])


def test_a_line_of_the_row_pass_is_laid_out_as_the_row_pass_of_triton(found):
    """So both add it up in the same order."""
    for width, (ours, theirs) in found["lines"].items():
        assert ours == theirs, width


def test_the_launch_that_lists_tasks_keeps_all_in_registers(found):
    assert found["list"] == 0


def main(names: list[str]) -> dict[str, dict]:
    from amoeba.core.config import Activation
    from amoeba.tasks.hopper import backward as hopper
    from amoeba.tasks.triton import bias_tasks
    from amoeba.tasks.triton.bias_tasks import BiasTasks
    from amoeba.tasks.triton.tickets import Table

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def numbers(count: int) -> torch.Tensor:
        return empty(count, dtype=torch.int32)

    hopper.multiprocessors = lambda device: 132
    kernel = hopper.backward_kernel = CompileOnly(hopper.backward_kernel.kernel)
    bias_tasks.address_table = lambda *tensors: empty(7, dtype=torch.int64)
    hopper.make_local_table = lambda *table: None
    hopper.make_list = lambda *told, **besides: numbers(8)
    hopper.make_table = lambda offs_E, block, counters: Table(numbers(8), numbers(9), numbers(8))
    made = {}
    others = SimpleNamespace(
        peers=SimpleNamespace(count=2, takers=64), rows=(0, 64), sends=1, room_for_dx=lambda: empty(64, 2048),
        context=lambda local: empty(16, dtype=torch.int64),
    )  # fmt: skip
    for name in (*names, "over ranks"):
        (H, I, E, K), T = SHAPES.get(name, SHAPES["qwen3_30b"]), 64
        assert hopper.why_not(K, Activation()) is None
        N = T * K
        weight_TK, expert_TK = empty(T, K, dtype=torch.float32), empty(T, K, dtype=torch.int32)
        hopper.hopper_backward(
            empty(T, H), empty(T, H), empty(N, 2 * I), expert_TK, weight_TK, empty(E, 2 * I, H), empty(E, H, I),
            Activation(), (numbers(N), numbers(N), numbers(E)), arrival=others if name == "over ranks" else None,
            small=name == "small", biases=BiasTasks(*((empty(E, 2 * I), empty(E, H)) if name == "biases" else ())),
        )  # fmt: skip
        compiled = kernel.last.compiled
        made[name] = figures(compiled) | in_loops(compiled) | {"order": order_of(compiled.asm["ptx"], WORDS)}
        made[name]["sends"] = order_of(compiled.asm["ptx"], OVER_RANKS)
        made[name]["drawn_waits"] = after_drawing(compiled)
        made[name]["fences_among_gathers"] = fences_among_gathers(compiled)
    return made | {"list": list_stack(), "lines": {I: lines_of(I) for I in (64, 128, 256, 768, 512, 1024, 1472)}}


WORDS = {
    "cp.async.bulk.wait_group 0": "arrived",
    "fence.proxy.async.global": "fence",
    "bar.sync": "barrier",
    "gpu.release.add": "release",
    "gpu.acquire": "acquire",
    "ld.acquire.gpu": "acquire",
}


OVER_RANKS = {
    "ld.global.v4": "load16",
    "st.global.v4": "store16",
    "bar.sync": "barrier",
    "sys.release.exch": "raise",
    "sys.acquire": "look",
}


def order_of(ptx: str, words: dict[str, str]) -> str:
    found = (next((word for sign, word in words.items() if sign in line), None) for line in ptx.splitlines())
    return " ".join(word for word in found if word)


def after_drawing(compiled) -> int:
    """Instructions from the draw in the loop to the first that waits for its result: of the 128 bits of an instruction,
    110 to 112 name the barrier that it will signal, 116 to 121 those that it waits for."""
    words = re.compile(r"/\*[0-9a-f]{4,}\*/ +(.*?);? */\* 0x[0-9a-f]{16} \*/\n *\s*/\* 0x([0-9a-f]{16}) \*/")
    found = [(text, int(high, 16)) for text, high in words.findall(told_by("nvdisasm", compiled, "-c", "-hex"))]
    draws = [at for at, (text, _) in enumerate(found) if "ATOMG" in text and "ADD" in text and ", RZ" not in text]
    barrier = found[draws[-1]][1] >> 46 & 7
    behind = found[draws[-1] + 1 :]
    return 1 + next(at for at, (_, high) in enumerate(behind) if high >> 52 >> barrier & 1)


def loops_of(compiled) -> list[list[str]]:
    """Their instructions, of those that are not long."""
    lines = told_by("nvdisasm", compiled, "-c").splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\s*\.(L_x_\d+):", line))}
    ends = [(target[1], at) for at, line in enumerate(lines) if (target := re.search(r"BRA.*\(\.(L_x_\d+)\)", line))]
    return [lines[labels[label] : at] for label, at in ends if 0 < at - labels[label] < 400]


def in_loops(compiled) -> dict[str, int]:
    """Loops with products, and accesses of local memory in them."""
    loops = [body for body in loops_of(compiled) if any("HGMMA" in each for each in body)]
    local = sum(bool(re.search(r"\b(LDL|STL)\b", each)) for body in loops for each in body)
    return {"loops": len(loops), "local_in_loops": local}


def fences_among_gathers(compiled) -> list[int]:
    """Of each loop in which threads gather rows and the copy engine loads."""
    loops = [body for body in loops_of(compiled) if all(any(sign in each for each in body) for sign in GATHERS)]
    return sorted(sum("MEMBAR" in each for each in body) for body in loops)


GATHERS = ("UTMALDG", "LDGSTS.E")


def list_stack() -> int:
    """Bytes, of qwen3_30b's sizes."""
    from amoeba.tasks.hopper.task_list import _make_list

    values = {"EXPERTS": 128, "TN": 3, "TNX": 8, "GROUP": 8, "STEPS": 7, "BLOCK_G": 16}
    values |= {"BLOCK_M": 128, "ROW_COUNTERS": 129, "BLOCK": 128}
    pointers = ("heaviest_E", "first_tile", "offs_E", "records")
    names = set(_make_list.kernel.arg_names) - values.keys()
    types = dict.fromkeys(names, "i32") | dict.fromkeys(pointers, "*i32")
    return figures(compile_as(_make_list.kernel, types, values, aligned=(), num_warps=4))["stack_bytes"]


def lines_of(intermediate: int) -> tuple[list, list]:
    """Layouts of a line of the row pass: ours, and the compiler's for `_activate_backward`."""
    from amoeba.core.config import Activation
    from amoeba.kernels.activate import BACKWARD_TILE, WARPS, _activate_backward
    from amoeba.kernels.activation import constants, group
    from amoeba.kernels.constants import Group
    from amoeba.tasks.hopper.backward import Plan

    plan = Plan(512, intermediate, 8, 2, **constants(Activation()))
    sizes = {"I": intermediate, "DA_STRIDE": intermediate, "H_STRIDE": plan.J, "DH_STRIDE": plan.J}
    sizes |= {"SCALED_A_STRIDE": intermediate, "NUM_EXPERTS": 8, "SCALES": plan.SCALES}
    values: dict = {"SIZES": Group(**sizes), "ACTIVATION": group(Activation())}
    values |= {"h_scales": None, "codes": None, "scales": None}
    values |= {"ROWS": BACKWARD_TILE // plan.BLOCK, "BLOCK": plan.BLOCK}
    types = {"da": "*fp16", "h": "*bf16", "weight": "*fp32", "order": "*i32", "offs": "*i32", "dh": "*bf16"}
    types |= {"scaled_a": "*bf16", "ds": "*fp32", "num_rows": "i32", "da_scales": "*fp32"}
    text = compile_as(_activate_backward.kernel, types, values, num_warps=WARPS).asm["ttgir"]
    name = re.search(r'"tt.reduce".*?\(tensor<\w+, (#\w+)>\)', text, re.DOTALL)[1]
    told = re.search(rf"^{name} = #ttg.blocked<(.*)>", text, re.MULTILINE)[1]
    ours = plan.LINE_LAYOUT
    return (
        [ours.size_per_thread, ours.threads_per_warp, ours.warps_per_cta],
        [[int(n) for n in each.split(", ")] for each in re.findall(r"\[([\d, ]+)\]", told)[:3]],
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
