"""The kernels of `peers` compile for Hopper, here without a GPU: 16 bytes at a time, and counters for the whole system.

What a counter says must not be seen before what it stands for, nor by one GPU alone: no test on one machine would fail
for sure. In a process of its own, this file as a program, since Triton's interpreter cannot compile.
"""

import json
import re

import pytest
from compiling import compile_as, compiled_by, resources, told_by

pytestmark = pytest.mark.thorough  # compiles for some seconds

KINDS = {
    "ld.global.v4.b32": "load16",
    "st.global.v4.b32": "store16",
    "bar.sync": "barrier",
    "atom.global.sys.release.add": "add",
    "red.global.sys.release.add": "add",
    "ld.global.sys.acquire": "look",
    "globaltimer": "clock",
}


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> dict[str, str]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("kernel", ["push", "push ahead", "take", "add"])
def test_rows_go_16_bytes_at_a_time_and_the_counter_follows_a_barrier(order, kernel: str) -> None:
    assert re.search(r"load16 .*store16 (\w+ )*barrier add( barrier)?$", order[kernel]), order[kernel]
    assert order[kernel].count("add") == 1


@pytest.mark.parametrize("kernel", ["push ids", "take ids"])
def test_ids_take_no_memory_for_registers(order, kernel: str) -> None:
    assert "spilled=0" in order[f"{kernel} figures"]


@pytest.mark.parametrize("kernel", ["send sums", "add sums", "own sums", "add kept"])
def test_sums_are_read_and_written_16_bytes_at_a_time_and_no_register_spills(order, kernel: str) -> None:
    assert re.search(r"load16 .*store16", order[kernel]), order[kernel]
    figures = dict(each.split("=") for each in order[f"{kernel} figures"].split())
    assert figures["spilled"] == "0"


@pytest.mark.parametrize(("kernel", "came"), [("send sums", 0), ("add sums", 2), ("own sums", 0), ("add kept", 2)])
def test_all_rows_of_a_token_are_asked_for_before_one_is_waited_for(order, kernel: str, came: int) -> None:
    """In the machine code, whose order is the assembler's: of what other ranks sent, and of K = 8 rows."""
    loads = order[f"{kernel} machine"].split("barrier")
    assert [part.count("load16") for part in loads] == ([came, 8, 0] if kernel != "add kept" else [came + 1])
    assert int(dict(each.split("=") for each in order[f"{kernel} figures"].split())["registers"]) <= 64


def test_counting_next_to_a_product_takes_what_it_leaves_of_a_multiprocessor(order) -> None:
    """A warp: 1024 of 65536 registers, and a kilobyte of shared memory, which the driver takes itself."""
    for kernel in ("wait", "taken", "everywhere"):
        figures = dict(each.split("=") for each in order[f"{kernel} figures"].split())
        assert int(figures["registers"]) <= 32 and int(figures["shared"]) <= 1024, kernel


@pytest.mark.parametrize("kernel", ["push", "wait", "taken"])
def test_a_wait_looks_with_acquire_and_at_the_clock(order, kernel: str) -> None:
    assert re.search(r"look .*clock .*look .*clock", order[kernel]), order[kernel]


def main() -> dict[str, str]:
    from amoeba.kernels import peer_context, peer_rows, peer_sums
    from amoeba.kernels.constants import Group

    pointers = dict.fromkeys(("addresses", "epochs", "trouble", "record", "places"), "*i64")
    pointers |= dict.fromkeys(("rows", "rows_TH", "rows_RH", "out_RH", "out_TH", "own_TH"), "*bf16")
    pointers |= {"expert_RK": "*i32", "weight_RK": "*fp32", "owned_P": "*i32"}
    pointers |= {"expert_TK": "*i64", "rank_E1": "*i64", "local_E1": "*i64", "weight_TK": "*fp32"}
    pointers |= dict.fromkeys(("wanted", "comes_R", "goes_WT"), "*u8") | {"slot_row": "*i32", "weight": "*fp32"}
    numbers = dict.fromkeys(
        ("cell_at", "cell_size", "rank", "limit", "tokens", "num_rows", "parts", "count", "most_tokens", "experts"),
        "i32",
    )
    constants = {"H": 2048, "BLOCK_T": 8, "BLOCK_H": 2048, "ALIGNED": True, "RANKS": 2, "ON_GPU": True, "CHANNEL": 1}
    constants |= {"TAKERS": 64, "PUSHERS": 16, "PARTS": 16, "WHICH": 0, "OWN": False, "WIDE": False, "TELLS": True}
    constants |= {"K": 8, "BLOCK": 1024}
    constants |= {"SUMS": Group(K=8, H=2048, ROW_STRIDE=2048, OUT_STRIDE=2048, AT_ONCE=8, BLOCK=1024)}
    constants |= {"AHEAD": False, "BLOCK_K": 8}
    kernels = {
        "push": peer_rows._push_rows,
        "push ahead": peer_rows._push_rows,
        "take": peer_rows._take_rows,
        "add": peer_rows._add_rows,
    }
    kernels |= {"take ids": peer_rows._take_slots, "push ids": peer_rows._push_slots}
    sums = {"send sums": peer_sums._send_sums, "add sums": peer_sums._add_sums}
    sums |= {"own sums": peer_sums._own_sums, "add kept": peer_sums._add_kept}
    alone = {
        "wait": peer_context.wait_for_arrivals,
        "taken": peer_context.wait_until_taken,
        "everywhere": peer_context.add_everywhere,
    }
    found = {}
    for name, function in (kernels | sums | alone).items():
        kernel = function.kernel
        arguments = kernel.arg_names
        types = {name: of for name, of in (pointers | numbers).items() if name in arguments}
        whole = [each for each in arguments if each in pointers or each.startswith("cell")]
        known = {each: value for each, value in constants.items() if each in arguments}
        known |= {"AHEAD": True} if name == "push ahead" else {"BLOCK_T": 256} if "ids" in name else {}
        warps = 1 if name in alone else 4 if name in sums else 8 if "ids" in name else 16
        compiled = compile_as(kernel, types, known, whole, num_warps=warps)
        ptx = compiled.asm["ptx"]
        found[f"{name} figures"] = (
            "registers={reg} spilled={stack}".format(**resources(compiled)) + f" shared={compiled.metadata.shared}"
        )
        if name in sums:
            machine = told_by("cuobjdump", compiled, "-sass")
            met = re.findall(r"LDG\.E\.128|BAR\.SYNC", machine)
            found[f"{name} machine"] = " ".join("load16" if each.startswith("LDG") else "barrier" for each in met)
        met = re.findall("|".join(re.escape(each) for each in KINDS), ptx)
        found[name] = " ".join(KINDS[each] for each in met)
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
