"""Frozen weights packed: every value in its place for both directions, zeros around them, refused with a reason.

E experts · O out · I in. That products with them are right is tests/cpu/test_products.py and tests/cpu/test_sums.py.
"""

import logging
import shutil

import pytest
import torch
from torch import Tensor

from amoeba.cpu import build
from amoeba.cpu import weights as packed
from amoeba.cpu.weights import PackedWeights, Path, _Packing
from selection import each_value_once

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
SHAPES = [(1, 1), (31, 760), (32, 32), (63, 199), (96, 31), (199, 96), (760, 63), (32, 1), (1, 199)]
KINDS = ["bf16", "int8"]


def weights_of(out_features: int, in_features: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, out_features, in_features).to(torch.bfloat16)


def unpacked(packing: _Packing) -> Tensor:
    """(E, columns, depth) as stored, by csrc/packed_layout.h; what lies around them is zero."""
    experts, per_word = packing.data.shape[0], 4 if packing.data.dtype == torch.int8 else 2
    panels = -(-packing.columns // 32)
    tiles = packing.data.view(experts, panels, -1, 2, 16, 16, per_word)  # panel, tile, half, word, column, element
    whole = tiles.permute(0, 1, 3, 5, 2, 4, 6).reshape(experts, panels * 32, -1)
    assert (whole[:, packing.columns :] == 0).all() and (whole[:, :, packing.depth :] == 0).all()
    return whole[:, : packing.columns, : packing.depth]


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_int8_has_a_scale_for_each_output_channel(out_features: int, in_features: int) -> None:
    weight_EOI = weights_of(out_features, in_features)
    packing = PackedWeights.pack(weight_EOI, "int8").forward
    assert packing.column_scale_EC is not None
    torch.testing.assert_close(packing.column_scale_EC, weight_EOI.float().abs().amax(2) / 127)
    values = unpacked(packing)
    assert (values.abs().amax(2) == 127).all()
    error = values * packing.column_scale_EC[:, :, None] - weight_EOI.float()
    assert (error.abs() <= 0.501 * packing.column_scale_EC[:, :, None]).all()
    assert torch.equal(packing.sum_EC, values.sum(2, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_packed_from_fp32_and_from_any_strides(kind: str) -> None:
    weight_EOI = weights_of(31, 96)
    plain = PackedWeights.pack(weight_EOI, kind)
    turned = PackedWeights.pack(weight_EOI.transpose(1, 2).contiguous().transpose(1, 2), kind)
    wide = PackedWeights.pack(weight_EOI.float(), kind)
    for other in (turned, wide):
        assert torch.equal(plain.forward.data.view(torch.uint8), other.forward.data.view(torch.uint8))


def test_a_path_that_is_not_there_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"generic, avx512, amx, got 'sse'"):
        packed._choose_path.__wrapped__("sse")


class Refusing:
    best_path = Path.AMX

    def request_amx(self) -> int:
        return 1  # EPERM


def test_a_refused_permission_is_named_and_avx512_takes_over(monkeypatch, caplog):
    monkeypatch.setattr(packed, "load_packed", Refusing)
    with caplog.at_level(logging.WARNING, "amoeba"):
        assert packed._choose_path.__wrapped__(None) is Path.AVX512
    assert "Linux refused the AMX tile registers (Operation not permitted)" in caplog.text
    with pytest.raises(build.CoreUnavailable, match="ARCH_REQ_XCOMP_PERM"):
        packed._choose_path.__wrapped__("amx")


@pytest.mark.parametrize("weight", [torch.zeros(2, 3, 4).double(), torch.zeros(3, 4), torch.zeros(2, 0, 4)])
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="weights are"):
        PackedWeights.pack(weight)
    with pytest.raises(ValueError, match="kind is one of bf16, int8, got 'fp8'"):
        PackedWeights.pack(torch.zeros(1, 2, 3), "fp8")  # type: ignore[arg-type]


@each_value_once("dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 62, 198), (1, 31, 15), (1, 31, 192)], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_int8_refuses_what_it_cannot_hold(value, place, dtype, swapped):
    weight_EOI = weights_of(63, 199).to(dtype)
    weight_EOI[place] = value
    stored = weight_EOI.mT.contiguous().mT if swapped else weight_EOI
    with pytest.raises(ValueError, match=rf"NaN or an infinity in expert {place[0]}, output channel {place[1]}"):
        PackedWeights.pack(stored, "int8")
    kept = unpacked(PackedWeights.pack(stored, "bf16").forward)
    assert torch.equal(kept.isnan(), weight_EOI.isnan()) and torch.equal(kept.isinf(), weight_EOI.isinf())


def test_int8_takes_the_largest_finite_numbers() -> None:
    weight_EOI = torch.full((1, 2, 33), torch.finfo(torch.float32).max)
    assert PackedWeights.pack(weight_EOI, "int8").forward.column_scale_EC.isfinite().all()
