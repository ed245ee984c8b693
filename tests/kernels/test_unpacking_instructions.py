"""The instructions that decode e2m1 and blocks on a GPU, carried out here one by one: for every byte, against the
definition."""

import re

import pytest
import torch
import triton
import triton.language as tl

from amoeba.kernels import blocks
from amoeba.kernels.decode import weights
from amoeba.precision import E2M1

BYTES = torch.arange(256, dtype=torch.uint8)
NUMBERS = E2M1.decode_packed(BYTES[:, None])  # (256, 2): of the low four bits, of the high ones
MASK = 0xFFFFFFFF
LANES = [0, 4, 1, 5, 2, 6, 3, 7]  # the order in which the instructions give eight numbers


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def word_of(pair: torch.Tensor) -> int:
    low, high = pair.view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def carry_out(program: str, given: dict[str, int]) -> dict[str, int]:
    """What each register holds at the end."""
    registers = dict(given)
    for line in re.findall(r"^\s*([a-z][\w.]*) ([^;]+);", program, re.MULTILINE):
        name, places = line[0], [each.strip() for each in line[1].split(",")]
        a, b, c = ([registers[each] if each in registers else int(each, 0) for each in places[1:]] + [0, 0])[:3]
        match name:
            case "mov.b32":
                found = a
            case "shl.b32":
                found = a << b
            case "shr.b32":
                found = a >> b
            case "mul.lo.u32":
                found = a * b
            case "and.b32":
                found = a & b
            case "lop3.b32":
                table = {"0xEA": (a & b) | c, "0xE4": (c & a) | (~c & b)}
                found = table[places[4]]
            case "prmt.b32":
                each = a.to_bytes(4, "little") + b.to_bytes(4, "little")
                found = int.from_bytes([each[(c >> 4 * place) & 7] for place in range(4)], "little")
            case "fma.rn.bf16x2":
                a, b, c = (halves(word, torch.bfloat16).double() for word in (a, b, c))
                found = word_of((a * b + c).to(torch.bfloat16))
            case _:
                raise AssertionError(f"unknown: {name}")
        registers[places[0]] = found & MASK
    return registers


def pairs_of(program: str, dtype: torch.dtype, **given: int) -> torch.Tensor:
    """(256, 2), of all bytes, four at a time."""
    found = []
    for four in BYTES.view(-1, 4).tolist():
        registers = carry_out(program, {"$4": int.from_bytes(bytes(four), "little"), **given})
        low, high = (torch.cat([halves(registers[f"${at}"], dtype) for at in pair]) for pair in ((0, 1), (2, 3)))
        found.append(torch.stack([low, high], 1))
    return torch.cat(found).double()


def program(name: str) -> str:
    return without_registers(getattr(weights, name).value)


def without_registers(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if ".reg" not in line)


def test_pairs_in_fp16_are_the_numbers_divided_by_a_power_of_two() -> None:
    found = pairs_of(program("_PAIR_E2M1"), torch.float16) * weights.PAIR_SCALE.value
    assert torch.equal(found, NUMBERS.double())
    assert torch.equal(found.signbit(), NUMBERS.signbit())


@pytest.mark.parametrize("exponent", [65, 120, 127, 128, 191])
def test_scaled_pairs_in_bf16_are_exact_until_the_end_of_their_range(exponent: int) -> None:
    word = min(exponent + 63, 255) * 0x00800080
    found = pairs_of(program("_SCALED_PAIR_E2M1"), torch.bfloat16, **{f"${at}": word for at in range(5, 9)})
    assert torch.equal(found * weights.RAISED.value, NUMBERS.double() * 2.0 ** (exponent - 127))


@pytest.mark.parametrize("exponent", [65, 127, 191])
def test_scaled_lanes_are_the_same_numbers_in_their_own_order(exponent: int) -> None:
    word = min(exponent + 63, 255) * 0x00800080
    first = torch.arange(256, dtype=torch.uint8)
    for four in torch.stack([first, first.flip(0), first.roll(77), first.roll(150)], 1).tolist():
        given = {"$4": int.from_bytes(bytes(four), "little"), "$5": word}
        registers = carry_out(program("_SCALED_LANES_E2M1"), given)
        found = torch.cat([halves(registers[f"${at}"], torch.bfloat16) for at in range(4)]).double()
        expected = NUMBERS[four].flatten().double()[LANES]
        assert torch.equal(found * weights.RAISED.value, expected * 2.0 ** (exponent - 127))
        assert torch.equal(found.signbit(), expected.signbit())


def test_scales_of_four_bytes_are_raised_powers_of_two_or_infinite() -> None:
    for first in range(0, 256, 4):
        found = carry_out(program("_RAISED_E8M0"), {"$4": int.from_bytes(bytes(range(first, first + 4)), "little")})
        for at in range(4):
            exponent = first + at
            # of 2^-127, the least one, nothing is left in a number times it: 0 will do
            expected = min(exponent + 63, 255) * 0x00800080 if exponent else 0
            assert found[f"${at}"] == expected, exponent


@triton.jit
def _lanes_of(given, first, second, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, HEIGHT)[:, None]
    value = tl.load(given + row * (2 * WIDTH) + tl.arange(0, 2 * WIDTH)[None, :])
    left, right = weights.lanes(value, HEIGHT, WIDTH)
    at = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(first + at, left)
    tl.store(second + at, right)


def test_values_are_put_into_the_same_order(device: torch.device) -> None:
    given = torch.arange(4 * 32, dtype=torch.float32, device=device).view(4, 32)
    first, second = torch.empty(2, 4, 16, device=device)
    _lanes_of[(1,)](given, first, second, HEIGHT=4, WIDTH=16)
    in_order = given.view(4, 4, 8)[..., LANES]
    assert torch.equal(first.view(4, 4, 4), in_order[..., :4])
    assert torch.equal(second.view(4, 4, 4), in_order[..., 4:])


@pytest.mark.parametrize("exponent", [192, 255])
def test_scales_beyond_it_give_nothing_finite(exponent: int) -> None:
    word = min(exponent + 63, 255) * 0x00800080
    found = pairs_of(program("_SCALED_PAIR_E2M1"), torch.bfloat16, **{f"${at}": word for at in range(5, 9)})
    assert not found.isfinite().any()


def words_of_bytes() -> list[int]:
    return [int.from_bytes(bytes(four), "little") for four in BYTES.view(-1, 4).tolist()]


def test_bytes_of_blocks_become_fp32_above_a_power_of_two() -> None:
    found = []
    for word in words_of_bytes():
        registers = carry_out(blocks._RAISE.value, {"$4": word})
        found += [registers[f"${at}"] for at in range(4)]
    numbers = torch.tensor(found).to(torch.int32).view(torch.float32) - blocks._RAISED.value
    assert torch.equal(numbers, BYTES.float())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_planes_of_four_bytes_are_taken_together(bits: int) -> None:
    for plane in range(8 // bits):
        take = blocks._TAKE.value[16 - 16 // bits + plane]
        found = [carry_out(take, {"$1": word})["$0"].to_bytes(4, "little") for word in words_of_bytes()]
        assert torch.equal(torch.tensor([*b"".join(found)]), BYTES.long() >> plane * bits & (1 << bits) - 1)


@pytest.mark.parametrize("low_bits", [2, 4])
@pytest.mark.parametrize("bits", [1, 2])
def test_high_bits_of_four_bytes_come_above_low_ones(bits: int, low_bits: int) -> None:
    take = without_registers(blocks._TAKE_HIGH.value[bits * 2 + low_bits // 2 - 3])
    for shift in range(0, 8, bits):
        given = {"$2": shift * 0x01010101}
        found = [carry_out(take, {"$1": word} | given)["$0"].to_bytes(4, "little") for word in words_of_bytes()]
        assert torch.equal(torch.tensor([*b"".join(found)]), (BYTES.long() >> shift & (1 << bits) - 1) << low_bits)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bytes_with_a_mask_are_shifted_and_others_stay(place: int) -> None:
    """Of a byte that is shifted, the bits that are its own."""
    instructions, shift = without_registers(blocks._SHIFT_SOME.value[place]), 1 << place
    for mask in (0x00000000, 0xFF00FF00, 0x00FF00FF, 0xFFFFFFFF, 0x000000FF, 0xFF000000):
        shifted = torch.tensor([*mask.to_bytes(4, "little")]).bool().repeat(64)
        words = [carry_out(instructions, {"$1": word, "$2": mask})["$0"] for word in words_of_bytes()]
        found = torch.tensor([*b"".join(word.to_bytes(4, "little") for word in words)])
        own = (1 << 8 - shift) - 1
        assert torch.equal(found[~shifted], BYTES.long()[~shifted])
        assert torch.equal(found[shifted] & own, BYTES.long()[shifted] >> shift)
