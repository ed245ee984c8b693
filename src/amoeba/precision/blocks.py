"""Blocks: numbers of a row in one run of bytes, with their scales among them, as GGUF files have ggml's. NF4 of
bitsandbytes is kept so as well.

    values = dequantise_blocks(data, "q4_k", columns)       # fp32; data: uint8 (..., bytes of a row)
    data = quantise_blocks(values, "q4_k")                  # a plain rounding, without llama.cpp's search for scales

A number is scale · q, or scale · q + offset, each operation rounded in fp32: the bits of `gguf.dequantize`, and of
`bitsandbytes.functional.dequantize_4bit`.

| kind | numbers, bytes | q | scale | offset |
|---|---|---|---|---|
| q8_0, q5_0, q4_0 | 32: 34, 22, 18 | signed | fp16 | - |
| q5_1, q4_1 | 32: 24, 20 | unsigned | fp16 | fp16 |
| q5_k, q4_k | 256: 176, 144 | unsigned | of 32: 6 bits x fp16 | of 32: 6 bits x fp16 |
| q2_k | 256: 84 | unsigned | of 16: 4 bits x fp16 | of 16: 4 bits x fp16 |
| q6_k, q3_k | 256: 210, 110 | signed | of 16: 8 or 6 bits x fp16 | - |
| mxfp4 | 32: 17 | e2m1 | e8m0 | - |
| nf4 | 64: 36 | one of 16 numbers | fp32 | - |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Of a block: q (n, groups, numbers), scales (n, groups) and offsets (n, groups), in fp32.
Parts = tuple[Tensor, Tensor, Tensor | None]


class BlockKind(NamedTuple):
    numbers: int
    bytes: int
    parts: Callable[[Tensor], Parts]


def dequantise_blocks(data: Tensor, kind: str, columns: int | None = None) -> Tensor:
    """columns: of a row, where its last block is not full."""
    found = BLOCK_KINDS[kind]
    q, scale, offset = found.parts(data.reshape(-1, found.bytes))
    values = q * scale[..., None]
    if offset is not None:
        values += offset[..., None]
    return values.reshape(*data.shape[:-1], -1)[..., :columns]


def mxfp4_parts(data: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of blocks, as `amoeba.precision.formats.MXFP4` has them: no bit changes."""
    blocks = data.unflatten(-1, (-1, 17))
    return _pairs(_halves(blocks[..., 1:])).flatten(-2), blocks[..., 0].contiguous()


def _pairs(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """(n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """All low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor, width: int) -> Tensor:
    """(..., b) -> (..., 8 / width, b): the lowest bits of all bytes, then the next."""
    return torch.stack([packed >> shift & (1 << width) - 1 for shift in range(0, 8, width)], -2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8)[:, None].float(), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> Parts:
    return _halves(blocks[:, 2:])[:, None].float() - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _halves(blocks[:, 4:])[:, None].float(), _half(blocks, 0), _half(blocks, 2)


def _five(low: Tensor, high: Tensor) -> Tensor:
    """Nibbles with a fifth bit, which four bytes have of all 32."""
    return (
        _halves(low) | (high[..., None] >> torch.arange(8, dtype=torch.uint8, device=high.device) & 1).flatten(1) << 4
    )


def _q5_0(blocks: Tensor) -> Parts:
    return _five(blocks[:, 6:], blocks[:, 2:6])[:, None].float() - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return _five(blocks[:, 8:], blocks[:, 4:8])[:, None].float(), _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of eight groups: 6 bits each, in bytes 4 to 15, times the two numbers in fp16."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return _half(blocks, 0) * scale.float(), -(_half(blocks, 2) * least.float())


def _q4_k(blocks: Tensor) -> Parts:
    return _bits(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1, 2).float(), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    low = _bits(blocks[:, 48:].unflatten(1, (4, 32)), 4).flatten(1, 2)
    return (low | _bits(blocks[:, 16:48], 1) << 4).float(), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 4).unflatten(-1, (2, 32)).flatten(2, 3)
    q = low | _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return q.reshape(-1, 16, 16).float() - 32, scale, None


def _q2_k(blocks: Tensor) -> Parts:
    q = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    scale, least = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    return q.float(), _half(blocks, 80) * scale, -(_half(blocks, 82) * least)


def _q3_k(blocks: Tensor) -> Parts:
    low = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    high = _bits(blocks[:, :32], 1).reshape(-1, 16, 16)
    fine, coarse = _halves(blocks[:, 96:104]), _bits(blocks[:, 104:108], 2).flatten(1)
    q = low.float() - 4 * (1 - high.float())
    return q, _half(blocks, 108) * ((fine | coarse << 4).float() - 32), None


def _mxfp4(blocks: Tensor) -> Parts:
    sizes = torch.tensor(_E2M1, dtype=torch.float32, device=blocks.device)
    exponent = blocks[:, :1].to(torch.int32)
    scale = torch.where(exponent == 0, 1 << 22, exponent << 23).masked_fill(exponent == 255, 0x7FC00000)
    return sizes[_halves(blocks[:, 1:]).to(torch.int32)][:, None], scale.view(torch.float32), None


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Quantiles of the normal distribution, as bitsandbytes has them, with a zero.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _nf4(blocks: Tensor) -> Parts:
    """A scale, then low nibbles of the first half of the numbers, and high ones of the second."""
    numbers = torch.tensor(NF4, dtype=torch.float32, device=blocks.device)
    return (
        numbers[_halves(blocks[:, 4:]).to(torch.int32)][:, None],
        blocks[:, :4].contiguous().view(torch.float32),
        None,
    )


BLOCK_KINDS = {
    "q8_0": BlockKind(32, 34, _q8_0),
    "q5_0": BlockKind(32, 22, _q5_0),
    "q5_1": BlockKind(32, 24, _q5_1),
    "q4_0": BlockKind(32, 18, _q4_0),
    "q4_1": BlockKind(32, 20, _q4_1),
    "q6_k": BlockKind(256, 210, _q6_k),
    "q5_k": BlockKind(256, 176, _q5_k),
    "q4_k": BlockKind(256, 144, _q4_k),
    "q3_k": BlockKind(256, 110, _q3_k),
    "q2_k": BlockKind(256, 84, _q2_k),
    "mxfp4": BlockKind(32, 17, _mxfp4),
    "nf4": BlockKind(64, 36, _nf4),
}


def quantise_blocks(matrix: Tensor, kind: str) -> Tensor:
    """uint8 (..., bytes of a row). A block with NaN or an infinity becomes NaN."""
    numbers = BLOCK_KINDS[kind].numbers
    wide = F.pad(matrix.detach().float(), (0, -matrix.shape[-1] % numbers)).reshape(-1, numbers)
    finite = wide.nan_to_num(0.0, 0.0, 0.0)
    whole = torch.where(wide.isfinite().all(1, keepdim=True), 1.0, torch.nan)
    return PACKED_KINDS[kind](finite, whole).reshape(*matrix.shape[:-1], -1)


def _halfs(*numbers: Tensor) -> Tensor:
    return torch.cat(numbers, 1).to(torch.float16).view(torch.uint8)


def _rounded(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    safe = torch.where(scale == 0, 1, scale)
    return (values / safe).round().clamp(least, most)


def _power(numbers: Tensor) -> Tensor:
    """The power of two that is at least as large; 0 for 0. Scales are such: simple numbers keep their values."""
    mantissa, exponent = numbers.frexp()
    return torch.ldexp(torch.where(numbers == 0, 0.0, 1.0), exponent - (mantissa == 0.5).to(exponent.dtype))


def _pack_q8_0(values: Tensor, whole: Tensor) -> Tensor:
    scale = _power(values.abs().amax(1, keepdim=True) / 127)
    q = _rounded(values, scale, -127, 127).to(torch.int8).view(torch.uint8)
    return torch.cat((_halfs(scale * whole), q), 1)


def _pack_q4_0(values: Tensor, whole: Tensor) -> Tensor:
    scale = _power(values.abs().amax(1, keepdim=True) / 7)
    q = (_rounded(values, scale, -8, 7) + 8).to(torch.uint8)
    return torch.cat((_halfs(scale * whole), q[:, :16] | q[:, 16:] << 4), 1)


def _k_codes(values: Tensor, whole: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Of q4_k and q5_k: q (n, 8, 32), and the 16 bytes before them."""
    groups = values.view(-1, 8, 32)
    least = (-groups.amin(2)).clamp(min=0)
    width = _power((groups.amax(2) + least) / most)
    scale, offset = (_power(each.amax(1, keepdim=True)) / 32 for each in (width, least))
    of_scale, of_offset = _rounded(width, scale, 1, 63), _rounded(least, offset, 0, 63)
    q = _rounded(groups + (offset * of_offset)[..., None], (scale * of_scale)[..., None], 0, most).to(torch.uint8)
    s, m = of_scale.to(torch.uint8), of_offset.to(torch.uint8)
    packed = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return q, torch.cat((_halfs(scale * whole, offset), *packed), 1)


def _nibbles(q: Tensor) -> Tensor:
    """(n, 2 g, b) -> (n, g · b): each even group in the low bits, the next one in the high ones."""
    return (q[:, 0::2] & 15 | q[:, 1::2] << 4).flatten(1)


def _joined(q: Tensor, width: int) -> Tensor:
    """(n, g, b) -> (n, b): the opposite of `_bits`."""
    return torch.stack([group << width * place for place, group in enumerate(q.unbind(1))]).sum(0, dtype=torch.uint8)


def _pack_q4_k(values: Tensor, whole: Tensor) -> Tensor:
    q, head = _k_codes(values, whole, 15)
    return torch.cat((head, _nibbles(q)), 1)


def _pack_q5_k(values: Tensor, whole: Tensor) -> Tensor:
    q, head = _k_codes(values, whole, 31)
    high = _joined(q >> 4, 1)
    return torch.cat((head, high, _nibbles(q)), 1)


def _pack_q6_k(values: Tensor, whole: Tensor) -> Tensor:
    groups = values.view(-1, 16, 16)
    width = _power(groups.abs().amax(2) / 31)
    scale = width.amax(1, keepdim=True) / 64
    of_scale = _rounded(width, scale, 1, 127)
    q = (_rounded(groups, (scale * of_scale)[..., None], -32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).flatten(1)
    high = _joined((q >> 4).flatten(0, 1), 2).view(-1, 64)
    return torch.cat((low, high, of_scale.to(torch.uint8), _halfs(scale * whole)), 1)


def _pack_nf4(values: Tensor, whole: Tensor) -> Tensor:
    scale = values.abs().amax(1, keepdim=True)
    numbers = torch.tensor(NF4, dtype=torch.float32, device=values.device)
    codes = torch.bucketize(values / torch.where(scale == 0, 1, scale), (numbers[1:] + numbers[:-1]) / 2)
    codes = codes.to(torch.uint8)
    return torch.cat(((scale * whole).view(torch.uint8), codes[:, :32] | codes[:, 32:] << 4), 1)


PACKED_KINDS = {
    **{"q8_0": _pack_q8_0, "q4_0": _pack_q4_0, "q4_k": _pack_q4_k, "q5_k": _pack_q5_k, "q6_k": _pack_q6_k},
    "nf4": _pack_nf4,
}
