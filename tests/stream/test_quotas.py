"""A tier's bytes among its layers."""

import random

import pytest

from amoeba.stream.attaching import least_budget, share_budget
from amoeba.stream.cache.trace import LayerShape
from amoeba.stream.sizes import parse_size, show_size

MIB = 1 << 20


def top_k(layers) -> list[int]:
    return [layer.top_k for layer in layers]


def used(slots, layers) -> int:
    return sum(count * layer.expert_bytes for count, layer in zip(slots, layers, strict=True))


def test_layers_get_the_same_and_the_remainder_goes_to_the_first():
    assert share_budget(33 * MIB, [LayerShape(128, 8, MIB)] * 4, least=[1] * 4) == [9, 8, 8, 8]


def test_layers_of_different_sizes_get_the_same_bytes_not_the_same_slots():
    layers = [LayerShape(128, 2, MIB), LayerShape(128, 2, 4 * MIB)]
    assert share_budget(80 * MIB, layers, least=[2, 2]) == [40, 10]


def test_a_remainder_too_small_for_one_layer_goes_to_another():
    assert share_budget(11 * MIB, [LayerShape(8, 1, 5 * MIB), LayerShape(8, 1, MIB)], least=[1, 1]) == [1, 6]


def test_what_a_small_layer_cannot_use_goes_to_the_others():
    assert share_budget(40 * MIB, [LayerShape(4, 2, MIB), LayerShape(128, 2, MIB)], least=[2, 2]) == [4, 36]
    assert share_budget(10**12, [LayerShape(4, 2, MIB), LayerShape(16, 2, MIB)], least=[2, 2]) == [4, 16]


def test_a_budget_below_the_minimum_says_the_minimum():
    layers = [LayerShape(128, 8, 9 * MIB)] * 48
    assert least_budget(layers, [8] * 48) == 48 * 8 * 9 * MIB
    with pytest.raises(
        ValueError, match=r"--vram: expected at least 3.38 GiB for 48 layers; got 1 GiB. Raise it to 3.38"
    ):
        share_budget(1 << 30, layers, least=[8] * 48, name="--vram")
    enough = parse_size("--vram", "3.38GiB")
    assert min(share_budget(enough, layers, least=[8] * 48)) >= 8, "what is said to be enough is enough"
    assert min(share_budget(432 * MIB, layers, least=[1] * 48)) == 1


def test_no_budget_is_exceeded_or_left_unused_by_a_whole_expert():
    dice = random.Random(0)
    for _ in range(200):
        layers = [LayerShape(dice.randint(4, 40), dice.randint(1, 4), dice.randint(1, 99)) for _ in range(7)]
        budget = least_budget(layers, top_k(layers)) + dice.randint(0, 5000)
        slots = share_budget(budget, layers, least=top_k(layers))
        assert used(slots, layers) <= budget
        for count, layer in zip(slots, layers, strict=True):
            assert layer.top_k <= count <= layer.experts
            assert count == layer.experts or used(slots, layers) + layer.expert_bytes > budget


def one_by_one(budget, layers, slots) -> list[int]:
    slots, waiting = list(slots), set(range(len(layers)))
    while waiting:
        index = min(waiting, key=lambda each: (slots[each] * layers[each].expert_bytes, each))
        size = layers[index].expert_bytes
        if slots[index] < layers[index].experts and used(slots, layers) + size <= budget:
            slots[index] += 1
        else:
            waiting.remove(index)
    return slots


def test_slots_are_as_if_given_one_by_one_to_the_smallest_layer():
    dice = random.Random(1)
    for _ in range(200):
        layers = [LayerShape(dice.choice((0, 3, 17)), 1, dice.choice((1, 4, 7, 30))) for _ in range(4)]
        least = [dice.randint(0, min(2, layer.experts)) for layer in layers]
        budget = least_budget(layers, least) + dice.randint(0, 400)
        assert share_budget(budget, layers, least=least) == one_by_one(budget, layers, least)


def test_a_layer_of_unknown_size_is_an_error():
    with pytest.raises(ValueError, match="layer 1: expected a known size of an expert; got 0"):
        share_budget(9, [LayerShape(8, 1, 1), LayerShape(8, 1)], least=[1, 1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 << 30), ("1.5 gib", 3 << 29), ("32GB", 32 * 10**9), ("512MiB", 512 * MIB), ("77", 77), ("0", 0)],
)
def test_sizes_are_read(text, expected):
    assert parse_size("--vram", text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 GiB GiB", "-8GiB", "8XB", "1e9", "nan"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ValueError, match="--vram: expected a size in bytes"):
        parse_size("--vram", text)


def test_sizes_are_shown_rounded_up():
    assert [show_size(size) for size in (0, 173.3, 1023, 1 << 30, (1 << 30) + 1, 432 * MIB)] == [
        *("0 B", "174 B", "1023 B", "1 GiB", "1.01 GiB", "432 MiB")
    ]
