"""A quantised matrix: its numbers, its scales, and how it is quantised and dequantised.

    quantised = quantise(weight_EJH, MXFP4)
    quantised.data, quantised.scales          # uint8 (E, J, H/2) and (E, J, H/32)
    quantised.dequantise()                    # fp32

Blocks at the ends of rows and columns may be cut: any size works. Where a matrix is made of several that were quantised
each by itself, as gate and up are in files, `parts` says so: blocks do not reach over from one into the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.precision.blocks import dequantise_blocks, quantise_blocks
from amoeba.precision.formats import E4M3, E8M0, Format

_SMALLEST_NORMAL = 2.0**-126
# Codes of e4m3 below and above the usual scale that `closest` tries. More bring nothing: 8.142 % error of the weights
# with these and with 4 and 8, 8.17 with 2 and 5, 9.53 with none (normally distributed numbers).
CLOSEST = (2, 6)
# Numbers of a stack whose matrices are quantised together; larger ones one after the other, for the memory it takes.
AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """
    data:    uint8 (..., rows, format.stored_columns(columns)).
    scales:  (..., blocks of rows, blocks of columns): fp32, or codes in uint8; empty where blocks have them inside.
    columns: of the matrix; codes that are packed may go on behind them, as zeros.
    parts:   how many equal parts the rows have, each with blocks of its own.
    matrix_scale: (...), fp32, where the format has it; (..., rows) where it has one for each row.
    """

    data: Tensor
    scales: Tensor
    format: Format
    columns: int
    parts: int = 1
    matrix_scale: Tensor | None = None

    def __post_init__(self) -> None:
        *leading, rows, stored = self.data.shape
        blocks = (*leading, *block_counts(rows, self.columns, self.format, self.parts))
        kind = torch.float32 if self.format.scale == "fp32" else torch.uint8
        fits = stored == self.format.stored_columns(self.columns) and tuple(self.scales.shape) == blocks
        if not fits or self.data.dtype != torch.uint8 or self.scales.dtype != kind:
            bytes_of_a_row = self.format.stored_columns(self.columns)
            raise bad_value(
                f"a matrix in {self.format.name}",
                f"{bytes_of_a_row} bytes (uint8) in a row of {self.columns} and {kind} scales {blocks}",
                f"data {self.data.dtype} {tuple(self.data.shape)}, scales {self.scales.dtype} "
                f"{tuple(self.scales.shape)}",
                "quantise it again, or check the number of columns and parts",
            )
        has_scale = self.matrix_scale is not None
        scales = (*leading, rows) if self.format.by_row else tuple(leading)
        if has_scale != self.format.has_matrix_scale or (
            self.matrix_scale is not None and tuple(self.matrix_scale.shape) != scales
        ):
            expected = f"one of shape {scales}" if self.format.has_matrix_scale else "none"
            got = None if self.matrix_scale is None else tuple(self.matrix_scale.shape)
            raise bad_value(f"matrix_scale of {self.format.name}", expected, got, "quantise it again")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.columns)

    @property
    def nbytes(self) -> int:
        tensors = (self.data, self.scales, self.matrix_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __getitem__(self, index: int) -> QuantisedMatrix:
        """Of a stack, one."""
        matrix_scale = None if self.matrix_scale is None else self.matrix_scale[index]
        return replace(self, data=self.data[index], scales=self.scales[index], matrix_scale=matrix_scale)

    def scale_values(self) -> Tensor:
        """fp32, with the number of the whole matrix in them."""
        if self.format.scale == "fp32":
            return self.scales
        if self.format.scale == "e8m0":
            return E8M0.decode(self.scales)
        assert self.matrix_scale is not None
        wide = self.matrix_scale[..., None] if self.format.by_row else self.matrix_scale[..., None, None]
        return E4M3.decode(self.scales) * wide

    def transposed(self) -> QuantisedMatrix:
        """The same numbers with rows for columns; of square blocks, so that the scales are the same as well."""
        element, rows = self.format.element, self.data.shape[-2]
        data = self.data if element.bits == 8 else element.unpack(self.data)[..., : self.columns]
        data = data.mT.contiguous()
        if element.bits == 4:
            data = element.pack(F.pad(data, (0, 2 * self.format.stored_columns(rows) - rows)))
        return replace(self, data=data, scales=self.scales.mT.contiguous(), columns=rows)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Each number is a product in fp32 of what its code stands for and of its scale, rounded to dtype."""
        element, (block_rows, block_columns) = self.format.element, self.format.block
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype, device=self.data.device)
        if self.format.scale == "inside":
            return dequantise_blocks(self.data, self.format.name, self.columns).to(dtype)
        values = element.decode_packed(self.data) if element.bits == 4 else element.decode(self.data)
        values = values[..., : self.columns]
        scales = self.scale_values()
        if block_rows > 1:
            of_part = self.shape[-2] // self.parts
            scales = scales.unflatten(-2, (self.parts, -1)).repeat_interleave(min(block_rows, of_part), dim=-2)
            scales = scales[..., :of_part, :].flatten(-3, -2)
        if self.columns <= block_columns:
            return (values * scales).to(dtype)
        if self.columns % block_columns == 0:
            return (values.unflatten(-1, (-1, block_columns)) * scales[..., None]).flatten(-2).to(dtype)
        return (values * scales.repeat_interleave(block_columns, dim=-1)[..., : self.columns]).to(dtype)


def packed_bytes(columns: int, format: Format) -> int:
    """Of a row of `pack_rows`: its codes, its scales, and what fills up 16 bytes."""
    return -(-(columns + 4 * -(-columns // format.block[1])) // 16) * 16


def pack_rows(rows: QuantisedMatrix) -> Tensor:
    """int32 (rows, packed_bytes / 4): for sending, each row with its scales. The format has one in fp32 for each block
    of a row."""
    data, scales = rows.data, rows.scales.contiguous().view(torch.uint8)
    filler = packed_bytes(rows.columns, rows.format) - data.shape[1] - scales.shape[1]
    return torch.cat((data, scales, data.new_zeros((data.shape[0], filler))), 1).view(torch.int32)


def unpack_rows(packed: Tensor, columns: int, format: Format) -> QuantisedMatrix:
    counts = block_counts(packed.shape[0], columns, format)
    data, scales, _ = packed.view(torch.uint8).tensor_split((columns, columns + 4 * counts[1]), 1)
    # a copy: of a single row .contiguous() would be the same bytes, which begin where a number of 4 bytes cannot
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return QuantisedMatrix(data.contiguous(), scales, format, columns)


def block_counts(rows: int, columns: int, format: Format, parts: int = 1) -> tuple[int, int]:
    """Scales of a matrix, down and across."""
    if format.scale == "inside":
        return 0, 0
    block_rows, block_columns = format.block
    return parts * -(-(rows // parts) // block_rows), -(-columns // block_columns)


def quantise(matrix: Tensor, format: Format, *, parts: int = 1, closest: bool = False) -> QuantisedMatrix:
    """matrix: (rows, columns), or a stack of such, each quantised by itself.
    closest: of the scales around the usual one, each block of four-bit numbers takes that with the least squared error.

    Scales come from the largest finite number of a block. NaN and infinities become NaN, as products with them would
    not be finite either; where the element has no NaN, the scale makes the whole block NaN.
    """
    if matrix.dim() < 2 or not matrix.is_floating_point() or parts < 1 or matrix.shape[-2] % parts:
        got = f"{matrix.dtype} {tuple(matrix.shape)}, parts {parts}"
        raise bad_value("matrix", "(..., rows, columns) of floating point, in equal parts", got, "stack its rows")
    quantised = empty_quantised(tuple(matrix.shape), format, parts, matrix.device)
    if matrix.untyped_storage().device.type != "meta":  # of which nothing but shapes is asked
        quantise_again(matrix, quantised, closest)
    return quantised


def empty_quantised(
    shape: tuple[int, ...], format: Format, parts: int = 1, device: torch.device | str = "cpu"
) -> QuantisedMatrix:
    """With room for a matrix, or a stack of matrices, of this shape."""
    *leading, rows, columns = shape
    scale_dtype = torch.float32 if format.scale == "fp32" else torch.uint8
    data = torch.empty((*leading, rows, format.stored_columns(columns)), dtype=torch.uint8, device=device)
    scales = torch.empty((*leading, *block_counts(rows, columns, format, parts)), dtype=scale_dtype, device=device)
    of_matrix = (*leading, rows) if format.by_row else leading
    matrix_scale = torch.empty(of_matrix, dtype=torch.float32, device=device) if format.has_matrix_scale else None
    return QuantisedMatrix(data, scales, format, columns, parts, matrix_scale)


def quantise_again(matrix: Tensor, into: QuantisedMatrix, closest: bool = False) -> None:
    """Other numbers where those of a matrix of the same shape were."""
    leading = matrix.shape[:-2]
    tensors = [tensor for tensor in (into.data, into.scales, into.matrix_scale) if tensor is not None]
    if matrix.numel() <= AT_ONCE and all(tensor.is_contiguous() for tensor in tensors):
        parts, scales = into.parts * leading.numel(), into.scales.flatten(0, -2)
        _quantise(
            matrix.flatten(0, -2), into.format, parts, into.data.flatten(0, -2), scales, into.matrix_scale, closest
        )
        return
    for place in itertools.product(*map(range, leading)):
        its_scale = None if into.matrix_scale is None else into.matrix_scale[place]
        _quantise(matrix[place], into.format, into.parts, into.data[place], into.scales[place], its_scale, closest)


def _quantise(
    matrix: Tensor,
    format: Format,
    parts: int,
    data: Tensor,
    scales: Tensor,
    matrix_scale: Tensor | None,
    closest: bool,
) -> None:
    """Into data, scales and matrix_scale: of one matrix, or of as many below each other as there are of these."""
    if matrix.numel() == 0:
        return
    if format.scale == "inside":
        data.copy_(quantise_blocks(matrix, format.name))
        return
    matrix = matrix.detach().to(torch.float32)
    (rows, columns), (block_rows, block_columns) = matrix.shape, format.block
    down, across = scales.shape[0] // parts, scales.shape[1]
    of_part = rows // parts
    if format.element.bits == 8:  # no wider than the matrix; narrower codes fill whole blocks
        block_rows, block_columns = min(block_rows, max(of_part, 1)), min(block_columns, columns)
    padded = F.pad(
        matrix.reshape(parts, of_part, columns), (0, across * block_columns - columns, 0, down * block_rows - of_part)
    )
    blocks = padded.view(parts, down, block_rows, across, block_columns)
    finite = blocks.abs().masked_fill(~blocks.isfinite(), 0)
    largest = finite.amax(dim=(2, 4))
    of_matrix = None if matrix_scale is None else _of_matrix(largest, format, matrix_scale)
    codes, values = _scales(largest, format, of_matrix)
    if closest and block_rows == 1 and format.element.bits == 4:
        codes, values = _closest(blocks, format, codes, values, of_matrix)
    quotients = blocks / values[:, :, None, :, None]
    encoded = format.element.encode(quotients).view(parts, down * block_rows, -1)[:, :of_part].reshape(rows, -1)
    if format.element.bits == 4:
        encoded = format.element.pack(encoded)
        not_finite = (~blocks.isfinite()).any(dim=4).any(dim=2)
        codes = codes.masked_fill(not_finite, E8M0.nan if format.scale == "e8m0" else 0x7F)
    data.copy_(encoded[:, : data.shape[1]])
    scales.copy_(codes.view_as(scales))


def _of_matrix(largest: Tensor, format: Format, matrix_scale: Tensor) -> Tensor:
    """Writes the numbers that matrices or rows have of their own; as they multiply the scales of the blocks."""
    of_all = largest.amax(dim=2).flatten() if format.by_row else largest.view(matrix_scale.numel(), -1).amax(dim=1)
    of_all = of_all.view_as(matrix_scale)
    matrix_scale.copy_(_divided(of_all, format.element.largest * E4M3.largest).clamp(min=_SMALLEST_NORMAL))
    matrix_scale.masked_fill_(of_all == 0, 1)
    if format.by_row:
        return matrix_scale.view(*largest.shape[:2], 1)
    return matrix_scale.flatten().repeat_interleave(largest.shape[0] // matrix_scale.numel())[:, None, None]


def _scales(largest: Tensor, format: Format, of_matrix: Tensor | None) -> tuple[Tensor, Tensor]:
    """As they are stored, and as numbers to divide by, of which none is 0."""
    element = format.element
    if format.scale == "fp32" or format.power_of_two:
        found = _divided(largest, element.largest).clamp(min=_SMALLEST_NORMAL).masked_fill(largest == 0, 1)
        if not format.power_of_two:
            return found, found
        mantissa, exponent = found.frexp()  # a half is a power of two already
        codes = (exponent - (mantissa == 0.5).to(exponent.dtype) + E8M0.bias).to(torch.uint8)
        found = E8M0.decode(codes)
        return (codes if format.scale == "e8m0" else found), found
    if format.scale == "e8m0":
        exponent = largest.frexp().exponent - 1 - element.exponent  # floor(log2(largest)), exact
        exponent = exponent.masked_fill(largest == 0, -E8M0.bias).clamp(-E8M0.bias, E8M0.bias)
        codes = (exponent + E8M0.bias).to(torch.uint8)
        return codes, E8M0.decode(codes)
    assert of_matrix is not None
    codes = E4M3.encode(_divided(largest, element.largest) / of_matrix)
    values = E4M3.decode(codes) * of_matrix
    return codes, values.masked_fill(values == 0, torch.inf)  # such a block is zeros, whatever its codes


def _closest(
    blocks: Tensor, format: Format, first: Tensor, values: Tensor, of_matrix: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Other scales and their values, of those near by. Errors are compared in units that cost no rounding, and added up
    by halves, so that every device chooses the same."""
    below, above = (0, 1) if format.scale == "e8m0" else CLOSEST
    codes, found = first, values
    least = _error(blocks, format, values, torch.ones_like(values) if format.scale == "e8m0" else E4M3.decode(first))
    for step in range(-below, above + 1):
        if format.scale == "e8m0":
            allowed = (first > 0) & (first < E8M0.nan - 1)
            other = first + allowed.to(torch.uint8) * step
            value = E8M0.decode(other)
            size = value / values  # 1 or 2
        else:
            assert of_matrix is not None
            other = (first.to(torch.int16) + step).clamp(1, 126).masked_fill(first == 0, 0).to(torch.uint8)
            size = E4M3.decode(other)
            value = (size * of_matrix).masked_fill(first == 0, torch.inf)
        error = _error(blocks, format, value, size)
        better = error < least
        codes, found = torch.where(better, other, codes), torch.where(better, value, found)
        least = torch.where(better, error, least)
    return codes, found


def _error(blocks: Tensor, format: Format, values: Tensor, size: Tensor) -> Tensor:
    """Squared, of each block, in units of size / values."""
    quotients = blocks / values[:, :, None, :, None]
    wrong = quotients.abs() - format.element.decode(format.element.encode(quotients)).abs()
    squares = wrong.square()
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return squares[:, :, 0, :, 0] * size.square()


def _divided(numbers: Tensor, divisor: float) -> Tensor:
    """Rounded as a division is on every device: by a number of Python's, a GPU multiplies with its reciprocal instead,
    and some codes would differ from a CPU's."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)
