"""The kernels for few tokens with quantised weights compile for Hopper, here without one: all in registers. The order
that instructions for four bits give numbers in is the one that they count on, and launches that overlap wait in time.

    TRITON_CACHE_DIR=cubins python tests/compiled/test_decode_quantised_compiles.py      # a line of JSON
"""

import json
import re
from typing import Any

import pytest
import torch
import triton
from compiling import compile_for, compiled_by, resources, told_by
from test_decode_compiles import CompileOnly

pytestmark = pytest.mark.thorough  # compiles for half a minute


IN_BLOCKS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "nf4")
# Bytes of a thread's stack and accesses to it that a version of Triton leaves.
SPILLED = {
    "3.6": {
        "down_by_expert mxfp4": (8, 4),
        "up_by_expert q4_k listed": (8, 2),
        "up_by_expert q6_k many": (16, 6),
        "down_by_expert q6_k many": (16, 8),
    },
    "3.9": {"up_by_expert q6_k many": (72, 36), "down_by_expert q6_k many": (80, 38)},
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


def test_nothing_is_spilled_but_what_is_known(kernels):
    assert len(kernels) == 101
    known = SPILLED.get(triton.__version__.rpartition(".")[0], {})
    spilled = {name: (found["stack_bytes"], found["local_accesses"]) for name, found in kernels.items()}
    assert {name: each for name, each in spilled.items() if any(each) and each != known.get(name)} == {}


def test_codes_of_rows_are_multiplied_as_they_are(kernels):
    """By warpgroups, and by no conversion on the way: that takes 16 slots in a chunk."""
    for name in ("up_by_expert", "down_by_expert"):
        assert kernels[f"{name} fp8-128 e4m3"]["wgmma"] >= 8


def test_lanes_that_hold_one_sum_hold_the_same_bits(kernels):
    assert all(found["products_in_exchanges"] == 0 for found in kernels.values()), kernels


def test_one_token_exchanges_nothing_and_asks_for_all_before_it_multiplies(kernels):
    """The assembler would move loads to where they are used, also those of the next step of a long row."""
    alone = {name: found for name, found in kernels.items() if name.endswith("in lanes")}
    assert len(alone) == 10
    for name, found in alone.items():
        assert found["loads_after_products"] == 0, name
        assert found["barriers"] <= 4, name
        assert found["stores_to_shared"] <= 10, "the zero, and the last sum over warps"
        assert found["registers"] <= 128, name  # two programs of eight warps, at least


def test_four_bytes_side_by_side_are_decoded_together(kernels):
    """`scaled_lanes_e2m1` gives the eight numbers of a word in an order of its own: the word has to be the bytes 4i to
    4i + 3 of a row."""
    decoding = [found for name, found in kernels.items() if "by_expert" in name and "fp4" in name]
    assert len(decoding) == 14 and all(found["four_side_by_side"] for found in decoding), kernels


@pytest.mark.parametrize("format", ["fp8-128", "mxfp4", "nvfp4"])
def test_what_the_launch_ahead_writes_is_read_after_it(kernels, format):
    """No other test would see it, but one on a GPU now and then."""
    reads_first = {name: found["loads_before_wait"] for name, found in kernels.items() if name.endswith("early")}
    assert reads_first[f"down_by_expert {format} early"] == 1, "its expert's id, then lists"
    assert reads_first[f"sum_of_slots {format} early"] == 2, "ids and weights, then rows"


def test_a_launch_in_between_is_not_done_before_the_one_ahead_of_it(kernels):
    """Down waits for it alone, and reads lists that up wrote: programs of sentinels must not end before."""
    assert kernels["low of a nvfp4 early"]["waits"] == 2


class WithWaits(CompileOnly):
    def keep(self, name: str, made: Any) -> None:
        super().keep(name, made)
        before, *after = re.split(r"griddepcontrol\.wait|grid_dependency_wait", made.asm["ttir"])  # Triton 3.6, 3.9
        self.found[name] |= {"waits": len(after), "loads_before_wait": before.count("tt.load")}


class InLanes(CompileOnly):
    """Gluon, by its code."""

    def compile(self, arguments: tuple, constants: dict[str, Any]) -> None:
        made = compile_for(self.kernel, arguments, constants, gluon=True)
        name, code = self.kernel.__name__.strip("_"), told_by("nvdisasm", made, "-c")
        self.keep(name, made)
        instructions = re.findall(r"\*/ +(?:@!?\w+ +)?([A-Z][A-Z0-9]+)", code)
        first = instructions.index("FFMA")
        self.found[name] |= {
            "loads_after_products": instructions[first:].count("LDG"),
            "barriers": instructions.count("BAR"),
            "stores_to_shared": instructions.count("STS"),
            "registers": resources(made)["reg"],
        }


class WithOrder(WithWaits):
    def keep(self, name: str, made: Any) -> None:
        super().keep(name, made)
        # of codes and scales; another one takes scales alone
        (layout,) = re.findall(r"packed_element = 4 .*? : tensor<\d+x\d+xi8, (.*?)>>, tensor<", made.asm["ttgir"])
        self.found[name]["four_side_by_side"] = "dot_op" in layout and "kWidth = 4" in layout


def main() -> dict[str, dict[str, int]]:
    """64 tokens through Qwen3-30B's layers, 8 whose slots up's programs list for down's, once with factors, one, and
    256, which are 32 of an expert together. Then one by the kernels of `one_token`, and of Mixtral's layers: rows that
    are too long for registers."""
    from amoeba.core.problem import Problem
    from amoeba.core.weights import LoraFactors
    from amoeba.kernels import decode as decoding
    from amoeba.kernels.decode import (
        by_expert,
        by_slot,
        decode,
        low_rank,
        one_token,
        quantised_configuration,
        slot_lists,
    )
    from amoeba.kernels.decode.configuration import Configuration
    from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format, QuantisedMatrix
    from amoeba.precision.formats import OF_BLOCKS
    from amoeba.precision.quantised import block_counts
    from amoeba.precision.quantised_experts import QuantisedExperts

    E, K, H, I, R = 128, 8, 2048, 768, 16
    found: dict[str, dict[str, int]] = {}
    up, down, listing = by_expert._up_by_expert, by_expert._down_by_expert, slot_lists._list_slots
    total, low = by_expert._sum_of_slots, low_rank._low
    slots_up, slots_down = by_slot._up_by_slot, by_slot._down_by_token

    def empty(format: Format, rows: int, columns: int) -> QuantisedMatrix:
        data = torch.empty(E, rows, format.stored_columns(columns), dtype=torch.uint8)
        kind = torch.float32 if format.scale == "fp32" else torch.uint8
        scales = torch.empty(E, *block_counts(rows, columns, format), dtype=kind)
        return QuantisedMatrix(data, scales, format, columns, 1, torch.empty(E) if format.has_matrix_scale else None)

    def quantised(rows: torch.Tensor, kept: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(rows, dtype=torch.uint8), torch.empty(rows.shape[0], rows.shape[1] // 128)

    decoding._quantised = quantised

    def factors() -> LoraFactors:
        shapes = [(E, R, H), (E, I, R)] * 2 + [(E, R, I), (E, H, R)]
        return LoraFactors(*(torch.empty(shape, dtype=torch.float32) for shape in shapes), scaling=2.0)

    for format, way in (
        (MXFP4, ""),
        (NVFP4, "listed"),
        (MXFP4, "listed"),
        (FP8_128, "early"),
        (MXFP4, "early"),
        (NVFP4, "early"),
        (FP8_128, "one"),
        (MXFP4, "one"),
        (NVFP4, "one"),
        (FP8_128, "many"),
        (FP8_128, "e4m3"),
        (MXFP8, "many"),
        (MXFP4, "many"),
        (NVFP4, "many"),
        *((OF_BLOCKS[kind], way) for kind in IN_BLOCKS for way in ("listed", "one")),
        (OF_BLOCKS["q4_k"], "early"),
        (OF_BLOCKS["q6_k"], "many"),
    ):
        of_format: dict[str, dict[str, int]] = {}
        watched = WithOrder if format.element.bits == 4 else WithWaits
        by_expert._up_by_expert, by_expert._down_by_expert = watched(up, of_format), watched(down, of_format)
        slot_lists._list_slots, by_expert._sum_of_slots = CompileOnly(listing, of_format), WithWaits(total, of_format)
        low_rank._low = WithWaits(low, of_format)
        by_slot._up_by_slot, by_slot._down_by_token = (
            CompileOnly(slots_up, of_format),
            CompileOnly(slots_down, of_format),
        )
        tokens = {"early": 8, "one": 1, "many": 256, "e4m3": 256}.get(way, 64)
        with torch.device("meta"):
            weights = QuantisedExperts.holding(empty(format, 2 * I, H), empty(format, H, I))
            x_TH = torch.empty(tokens, H, dtype=torch.bfloat16)
            lora = factors() if (format, way) == (NVFP4, "early") else None
            problem = Problem(x_TH, torch.empty(tokens, K, dtype=torch.int64), torch.empty(tokens, K), weights, lora)
            ways = {"one": quantised_configuration.by_slot, "e4m3": quantised_configuration.in_e4m3}
            chosen = ways.get(way, quantised_configuration.by_expert)(problem)
            listed = way in ("listed", "many", "e4m3")
            chosen = chosen._replace(overlap=True, listed=listed, early=way == "early")
            decode(problem, configuration=chosen)
        found |= {f"{name} {format.name} {way}".strip(): figures for name, figures in of_format.items()}
    one_up, one_down = one_token._up, one_token._down
    qwen3, mixtral = (128, 8, 2048, 768), (8, 2, 4096, 14336)
    for format, sizes in (*((each, qwen3) for each in (FP8_128, MXFP8, MXFP4, NVFP4)), (MXFP4, mixtral)):
        E, K, H, I = sizes
        of_format = {}
        one_token._up, one_token._down = InLanes(one_up, of_format), InLanes(one_down, of_format)
        with torch.device("meta"):
            weights = QuantisedExperts.holding(empty(format, 2 * I, H), empty(format, H, I))
            x_TH = torch.empty(1, H, dtype=torch.bfloat16)
            problem = Problem(x_TH, torch.empty(1, K, dtype=torch.int64), torch.empty(1, K), weights, None)
            up, down = quantised_configuration.up_in_chunks(problem), quantised_configuration.down_in_chunks(problem)
            decode(problem, configuration=Configuration(by_slot=True, up=up, down=down, overlap=True))
        found |= {f"{name} {format.name} {E} in lanes": figures for name, figures in of_format.items()}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
