"""Packed frozen weights: every path right on awkward sizes, nothing touched beside the rows, refused with a reason."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor

from amoeba.cpu import build, packed
from amoeba.cpu.packed import PackedLibrary, PackedWeights, Path, multiply_rows, multiply_rows_transposed

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)

COUNTS = (0, 1, 7, 31, 0, 33, 200, 0)  # rows per expert
UNOWNED = 5
SHAPES = [(1, 1), (31, 760), (32, 32), (63, 199), (96, 31), (199, 96), (760, 63), (32, 1), (1, 199)]
LARGEST_ERROR = {"bf16": 5e-3, "int8": 3e-2}
LEAST_COSINE = {"bf16": 0.99995, "int8": 0.9995}
PATHS = ["generic", pytest.param("avx512"), pytest.param("amx", marks=pytest.mark.amx)]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if Path[request.param.upper()] > packed.load_packed().best_path:
        pytest.skip(f"this CPU with this compiler has {packed.load_packed().best_path.name} at best")
    monkeypatch.setenv("AMOEBA_CPU_PATH", request.param)
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Product:
    """Rows of several experts, with NaN in those that belong to nobody and in those that no index names."""

    def __init__(self, out_features: int, in_features: int, transposed: bool, counts: tuple[int, ...] = COUNTS) -> None:
        self.transposed = transposed
        self.offs_E = torch.tensor(counts).cumsum(0).to(torch.int32)
        self.owned = sum(counts)
        self.weight_EOI = torch.randn(len(counts), out_features, in_features).to(torch.bfloat16)
        depth, self.columns = (out_features, in_features) if transposed else (in_features, out_features)
        self.rows = torch.randn(self.owned + UNOWNED, depth).to(torch.bfloat16)
        self.rows[self.owned :] = torch.nan

    def run(
        self, weights: PackedWeights, out: Tensor, index_N: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        multiply = multiply_rows_transposed if self.transposed else multiply_rows
        multiply(weights, self.rows if rows is None else rows, self.offs_E, out, index_N)

    def expected(self) -> Tensor:
        parts, start = [], 0
        for weight, end in zip(self.weight_EOI.double(), self.offs_E.tolist(), strict=True):
            parts.append(self.rows[start:end].double() @ (weight if self.transposed else weight.t()))
            start = end
        return torch.cat(parts)

    def empty(self, dtype: torch.dtype) -> Tensor:
        return torch.full((self.owned + UNOWNED, self.columns), 7.0, dtype=dtype)


def check(got: Tensor, expected: Tensor, kind: str) -> None:
    got = got.double()
    error = float((got - expected).norm() / expected.norm())
    cosine = float((got * expected).sum() / (got.norm() * expected.norm()))
    print(f"{kind}: relative error {error:.1e}, cosine {cosine:.7f}")
    assert error < LARGEST_ERROR[kind]
    assert cosine > LEAST_COSINE[kind]


def test_the_check_can_fail() -> None:
    expected = torch.randn(50, 40).double()
    for kind, wrong in (("bf16", 1.006), ("int8", 1.04)):
        with pytest.raises(AssertionError):
            check(expected * wrong, expected, kind)
    missing = expected.clone()
    missing[0] = 0
    with pytest.raises(AssertionError):
        check(missing, expected, "int8")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_agree_with_fp64_and_touch_nothing_else(
    path: str, out_features: int, in_features: int, kind: str, transposed: bool, dtype: torch.dtype
) -> None:
    product = Product(out_features, in_features, transposed)
    out = product.empty(dtype)
    product.run(PackedWeights.pack(product.weight_EOI, kind), out)
    check(out[: product.owned], product.expected(), kind)
    assert (out[product.owned :] == 7).all(), "rows that belong to nobody were written"


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_each_row_is_right_by_itself(path: str, kind: str) -> None:
    """A norm over all rows would hide one wrong row of the many tiles."""
    product = Product(199, 96, transposed=False)
    out = product.empty(torch.float32)
    product.run(PackedWeights.pack(product.weight_EOI, kind), out)
    expected = product.expected()
    errors = (out[: product.owned].double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < (1e-5 if kind == "bf16" else 3e-2)
    by_column = (out[: product.owned].double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert by_column.max() < (1e-5 if kind == "bf16" else 3e-2)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_bf16_outputs_are_the_sums_rounded_to_nearest(path: str, kind: str) -> None:
    product = Product(63, 199, transposed=False)
    weights, wide, narrow = (
        PackedWeights.pack(product.weight_EOI, kind),
        *map(product.empty, (torch.float32, torch.bfloat16)),
    )
    product.run(weights, wide)
    product.run(weights, narrow)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_rows_are_gathered_by_an_index_and_strides_are_respected(path: str, kind: str) -> None:
    product = Product(63, 199, transposed=False)
    table = torch.full((2 * product.rows.shape[0], 250), torch.nan, dtype=torch.bfloat16)[:, 17 : 17 + 199]
    place = torch.randperm(table.shape[0])[: product.rows.shape[0]]
    table[place] = product.rows
    index = place.clone()
    index[product.owned :] = -1  # nobody's: never read
    wide = torch.full((product.owned + UNOWNED, 70), 7.0)
    product.run(PackedWeights.pack(product.weight_EOI, kind), wide[:, 3:66], index, rows=table)
    check(wide[: product.owned, 3:66], product.expected(), kind)
    assert (wide[:, :3] == 7).all() and (wide[:, 66:] == 7).all() and (wide[product.owned :] == 7).all()


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_threads_do_not_change_a_bit(path: str, kind: str, threads: int, set_threads: Callable[[int], None]) -> None:
    product = Product(760, 199, transposed=False)
    weights = PackedWeights.pack(product.weight_EOI, kind)
    alone, together = product.empty(torch.float32), product.empty(torch.float32)
    product.run(weights, alone)
    set_threads(threads)
    product.run(weights, together)
    assert torch.equal(alone, together)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_outputs_that_are_streamed_past_the_caches_are_whole(path: str, dtype: torch.dtype) -> None:
    product = Product(2048, 32, transposed=False, counts=(1500, 0, 601))
    assert product.owned * 2048 * 2 > 8 << 20, "the core streams above this size"
    out = product.empty(dtype)
    product.run(PackedWeights.pack(product.weight_EOI), out)
    check(out[: product.owned], product.expected(), "bf16")
    assert (out[product.owned :] == 7).all()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_nan_stays_in_its_row_and_is_not_lost(path: str, kind: str) -> None:
    product = Product(33, 65, transposed=False)
    product.rows[20, 64] = torch.nan
    out = product.empty(torch.bfloat16)
    product.run(PackedWeights.pack(product.weight_EOI, kind), out)
    assert out[20].isnan().all()
    assert not out[:20].isnan().any() and not out[21 : product.owned].isnan().any()


def test_zero_rows_and_zero_channels_of_int8_are_zeros(path: str) -> None:
    product = Product(33, 65, transposed=False)
    product.rows[10], product.weight_EOI[:, 5] = 0, 0
    out = product.empty(torch.float32)
    product.run(PackedWeights.pack(product.weight_EOI, "int8"), out)
    assert (out[10] == 0).all() and (out[: product.owned, 5] == 0).all()
    check(out[: product.owned], product.expected(), "int8")


def test_int8_keeps_rows_and_channels_of_very_different_size(path: str) -> None:
    product = Product(40, 96, transposed=False)
    product.rows[: product.owned] *= torch.logspace(-6, 6, product.owned)[:, None].to(torch.bfloat16)
    product.weight_EOI *= torch.logspace(-3, 3, 40)[:, None].to(torch.bfloat16)
    out, expected = product.empty(torch.float32), product.expected()
    product.run(PackedWeights.pack(product.weight_EOI, "int8"), out)
    # A value is off by up to half a step of 1/127 of the largest of its row or channel, which is 2.6 times the typical
    # one of 96: by 0.6 % of its length on either side, in a random direction. That is 9e-4 of |row| · |channel| in the
    # mean of the squares and 4.5 times that at worst. By row alone nothing could be said: its largest sums may cancel.
    counts = torch.tensor(COUNTS)
    channels = product.weight_EOI.double().norm(dim=2).repeat_interleave(counts, 0)
    possible = product.rows[: product.owned].double().norm(dim=1, keepdim=True) * channels
    error = (out[: product.owned] - expected) / possible
    assert error.square().mean().sqrt() < 1.1e-3
    assert error.abs().max() < 6e-3


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_weights_are_packed_from_fp32_and_from_any_strides(kind: str) -> None:
    product = Product(31, 96, transposed=False)
    plain = PackedWeights.pack(product.weight_EOI, kind)
    turned = PackedWeights.pack(product.weight_EOI.transpose(1, 2).contiguous().transpose(1, 2), kind)
    wide = PackedWeights.pack(product.weight_EOI.float(), kind)
    for other in (turned, wide):
        assert torch.equal(plain.forward.data.view(torch.uint8), other.forward.data.view(torch.uint8))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_backward_uses_the_very_weights_of_forward(path: str, kind: str) -> None:
    """Unit rows read the packed matrix out in both directions, exactly (one value per row quantises to itself)."""
    weights = PackedWeights.pack(torch.randn(1, 63, 40), kind)
    eye_in, eye_out = torch.eye(40).to(torch.bfloat16), torch.eye(63).to(torch.bfloat16)
    by_input, by_output = torch.empty(40, 63), torch.empty(63, 40)
    multiply_rows(weights, eye_in, torch.tensor([40], dtype=torch.int32), by_input)
    multiply_rows_transposed(weights, eye_out, torch.tensor([63], dtype=torch.int32), by_output)
    torch.testing.assert_close(by_input.t(), by_output, rtol=1e-5, atol=0)


@pytest.mark.amx
def test_tiles_left_by_torch_do_not_disturb_ours_nor_ours_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMOEBA_CPU_PATH", "amx")
    product = Product(96, 199, transposed=False)
    weights, dense = PackedWeights.pack(product.weight_EOI), torch.randn(129, 257).to(torch.bfloat16)
    theirs, ours = dense @ dense.t(), product.empty(torch.float32)
    product.run(weights, ours)
    for _ in range(3):
        out = product.empty(torch.float32)
        assert torch.equal(dense @ dense.t(), theirs)
        product.run(weights, out)
        assert torch.equal(out, ours)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("architecture", ["-march=x86-64", "-march=haswell"])
def test_older_instruction_sets_agree_too(architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = PackedLibrary(build.compiled_library("packed", architecture))
    assert library.best_path is Path.GENERIC
    monkeypatch.setattr(packed, "load_packed", lambda: library)
    monkeypatch.setenv("AMOEBA_CPU_PATH", "generic")
    for transposed in (False, True):
        product = Product(63, 199, transposed)
        out = product.empty(torch.float32)
        product.run(PackedWeights.pack(product.weight_EOI, kind), out)
        check(out[: product.owned], product.expected(), kind)


def test_a_path_that_is_not_there_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"generic, avx512, amx, got 'sse'"):
        packed._choose_path.__wrapped__("sse")


class Refusing:
    best_path = Path.AMX

    def request_amx(self) -> int:
        return 1  # EPERM


def test_a_refused_permission_is_named_and_avx512_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "load_packed", Refusing)
    with caplog.at_level(logging.WARNING, "amoeba"):
        assert packed._choose_path.__wrapped__(None) is Path.AVX512
    assert "Linux refused the AMX tile registers (Operation not permitted)" in caplog.text
    with pytest.raises(build.CoreUnavailable, match="ARCH_REQ_XCOMP_PERM"):
        packed._choose_path.__wrapped__("amx")


def test_tensors_that_are_not_taken_are_refused_before_a_pointer_is_taken() -> None:
    weights = PackedWeights.pack(torch.randn(1, 4, 8))
    offs, rows, out = torch.tensor([2], dtype=torch.int32), torch.zeros(2, 8, dtype=torch.bfloat16), torch.empty(2, 4)
    multiply_rows(weights, rows, offs, out)
    for bad in (rows.float(), rows[:, :7], torch.zeros(8, 2, dtype=torch.bfloat16).t(), rows[:1], rows[0]):
        with pytest.raises(AssertionError):
            multiply_rows(weights, bad, offs, out)
    for bad in (out.double(), out[:, :3], out[:1], torch.empty(4, 2).t()):
        with pytest.raises(AssertionError):
            multiply_rows(weights, rows, offs, bad)
    for bad in (offs.long(), torch.tensor([3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32), -offs):
        with pytest.raises(AssertionError):
            multiply_rows(weights, rows, bad, out)
    for bad in (
        torch.tensor([0, 2]),
        torch.tensor([-1, 0]),
        torch.tensor([0]),
        torch.tensor([0, 1], dtype=torch.int32),
    ):
        with pytest.raises(AssertionError):
            multiply_rows(weights, rows, offs, out, bad)


@pytest.mark.parametrize("weight", [torch.zeros(2, 3, 4).double(), torch.zeros(3, 4), torch.zeros(2, 0, 4)])
def test_weights_that_cannot_be_packed_are_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="weights are"):
        PackedWeights.pack(weight)
    with pytest.raises(ValueError, match="kind is one of bf16, int8, got 'fp8'"):
        PackedWeights.pack(torch.zeros(1, 2, 3), "fp8")  # type: ignore[arg-type]


def test_the_source_is_packaged() -> None:
    assert (FilePath(packed.__file__).parent / "csrc" / "packed.cpp").exists()
