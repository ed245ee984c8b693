"""The C++ core as Python functions over tensors. Every address is taken by `pointers`, which checks the tensor.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · O out

    core = load_core()
    core.multiply_rows(offs_E, rows_NI, matrix_EIO, out=out_NO)
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.torch_internals import constant_when_traced
from amoeba.cpu.build import CoreUnavailable, load, with_library
from amoeba.cpu.node_library import activation_number
from amoeba.cpu.pointers import (
    CPU,
    address,
    address_at_strides,
    address_of_lines,
    address_to_write,
    has_lines,
    optional_address,
)
from amoeba.cpu.weights import CCoding, ScaledCodes, current_path
from amoeba.cpu.weights import Path as CpuPath

logger = logging.getLogger("amoeba")

ExactFunction = Literal["exp", "sigmoid", "silu", "rsqrt"]
EXACT_FUNCTIONS: tuple[ExactFunction, ...] = get_args(ExactFunction)  # `ExactFunction` in csrc/exact.h

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # in the names of functions
# fmt: off
_SIGNATURES = {
    "amoeba_rows_f32": (
        _INT64, _POINTER, _POINTER, _INT64, _POINTER,       # experts, offs, rows, stride, index
        _POINTER, _INT64, _INT64, _INT64, _POINTER,         # matrix, its strides, bias
        _INT64, _INT64, _POINTER, _INT64, _INT,             # depth, columns, out, stride, threads
    ),
    **{f"amoeba_exact_rows_{dtype}": (
        _INT64, _POINTER, _POINTER, _INT64,                 # experts, offs, rows, stride
        _POINTER, _INT64, _INT64, _INT64,                   # matrix, its strides
        _INT64, _INT64, _POINTER, _INT64, _INT, *more,      # depth, columns, out, stride, threads
    ) for dtype, more in (("f32", ()), ("bf16", (_INT,)))},  # whether rows are bf16 and meet tiles
    "amoeba_rows_whole": (
        _INT64, _POINTER, _INT64, _POINTER, _INT64, _POINTER,  # experts, offs, count of rows, rows, stride, index
        _POINTER, _INT64, _INT64, _POINTER, _POINTER,       # blocks, their strides, coding, bias
        _INT64, _INT64, _POINTER, _INT64, _INT,             # depth, columns, out, stride, threads
    ),
    "amoeba_exact_row_sums": (_INT64, _INT64, _POINTER, _POINTER, _INT),  # rows, length, x, out, threads
    "amoeba_exact_values": (_INT, _INT64, _POINTER, _POINTER, _INT),      # function, count, x, out, threads
    "amoeba_weight_gradient_f32": (
        _INT64, _POINTER,                                   # experts, offs
        _POINTER, _INT64, _POINTER, _INT64,                 # left, stride, index, columns
        _POINTER, _INT64, _POINTER, _INT64,                 # right, stride, index, columns
        _POINTER, _INT64, _INT64, _INT,                     # gradient, its strides, threads
    ),
    "amoeba_rms_norm_f32": (
        _INT64, _INT64, _POINTER, _POINTER,                 # rows, length, x, weight
        _FLOAT, _FLOAT, _POINTER, _INT,                     # eps, shift of the weight, out, threads
    ),
    "amoeba_swiglu_f32": (
        _INT64, _INT64, _POINTER, _POINTER,                 # rows, intermediate, h, scale
        _FLOAT, _FLOAT, _FLOAT, _POINTER, _INT,             # alpha, limit, up_shift, a, threads
    ),
    "amoeba_swiglu_backward_f32": (
        _INT64, _INT64, _POINTER, _POINTER, _POINTER,       # rows, intermediate, da, h, scale
        _FLOAT, _FLOAT, _FLOAT,                             # alpha, limit, up_shift
        _POINTER, _POINTER, _POINTER, _INT,                 # dh, scaled a, ds, threads
    ),
    **dict.fromkeys((f"amoeba_decode_{kind}" for kind in ("f32", "bf16", "e4m3", "e2m1", "blocks")), (
        _INT64, _INT64, _INT64, _INT64, _INT64, _INT64,     # tokens, top_k, experts, hidden, intermediate, width
        _POINTER, _INT64, _POINTER, _POINTER, _POINTER,     # x, stride, expert ids, keys, weights
        _POINTER, _INT64, _INT64, _POINTER,                 # gate_up, its strides, coding of codes
        _POINTER, _POINTER,                                 # bias, added rows
        _POINTER, _INT64, _INT64, _POINTER, _POINTER,       # down, its strides, coding of codes, bias
        _INT, _INT, _FLOAT, _FLOAT, _FLOAT,                 # kind, interleaved, alpha, limit, up_shift
        _POINTER, _POINTER, _POINTER, _POINTER, _INT,       # scratch h, a and order, y, threads
    )),
    **dict.fromkeys(("amoeba_dequantise_f32", "amoeba_dequantise_bf16"), (
        _POINTER, _INT64, _POINTER, _INT64,                 # codes of an expert, bytes of a row, coding of all, expert
        _INT64, _INT64, _POINTER, _INT,                     # rows, columns, out, threads
    )),
    "amoeba_sum_decoded": (
        _INT64, _INT64, _INT64, _INT64,                     # tokens, top_k, experts, hidden
        _POINTER, _POINTER, _POINTER, _INT64,               # expert ids, weights, rows, stride
        _POINTER, _POINTER,                                 # scratch for an order, y
    ),
}
# fmt: on


class Core:
    """Handle of the loaded library."""

    def __init__(self, file: Path) -> None:
        self._library = load(file, {name: (None, arguments) for name, arguments in _SIGNATURES.items()})
        self.lanes: int = self._library.amoeba_lanes()
        self.in_whole_numbers = bool(self._library.amoeba_multiplies_whole())

    def activates(self, activation: Activation, intermediate: int) -> bool:
        """Whether the core has this activation: silu-gated, concatenated, whole vectors."""
        concatenated = activation.gated and not activation.interleaved
        return concatenated and activation.kind == "silu" and intermediate % self.lanes == 0

    def activate(self, h_NJ: Tensor, scale_N: Tensor, activation: Activation, *, out: Tensor) -> None:
        """out = scale · act(h)."""
        rows, intermediate = out.shape
        self._check_width(intermediate)
        self._library.amoeba_swiglu_f32(
            rows, intermediate,
            address("h_NJ", h_NJ, torch.float32, (rows, 2 * intermediate)),
            address("scale_N", scale_N, torch.float32, (rows,)),
            activation.alpha, activation.limit, activation.up_shift,
            address("out", out, torch.float32, (rows, intermediate)), torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, adds_one: bool = False) -> Tensor:
        """Over the last dimension, in fp32. adds_one: to the weight."""
        x, length = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        self._library.amoeba_rms_norm_f32(
            x.numel() // max(1, length), length, address("x", x, torch.float32, tuple(x.shape)),
            address("weight", weight, torch.float32, (length,)), eps, float(adds_one),
            address("out", out, torch.float32, tuple(x.shape)), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def activate_backward(
        self,
        da_NI: Tensor,
        h_NJ: Tensor,
        scale_N: Tensor,
        activation: Activation,
        dh_NJ: Tensor,
        scaled_a_NI: Tensor | None,
    ) -> Tensor:
        """From dA' (no scale in it yet): writes dh and scale·a, returns ds_N = <dA', a>."""
        rows, intermediate = da_NI.shape
        self._check_width(intermediate)
        ds_N = torch.empty(rows, dtype=torch.float32, device=CPU)
        self._library.amoeba_swiglu_backward_f32(
            rows, intermediate,
            address("da_NI", da_NI, torch.float32, (rows, intermediate)),
            address("h_NJ", h_NJ, torch.float32, (rows, 2 * intermediate)),
            address("scale_N", scale_N, torch.float32, (rows,)),
            activation.alpha, activation.limit, activation.up_shift,
            address("dh_NJ", dh_NJ, torch.float32, (rows, 2 * intermediate)),
            optional_address("scaled_a_NI", scaled_a_NI, torch.float32, (rows, intermediate)),
            address("ds_N", ds_N, torch.float32, (rows,)), torch.get_num_threads(),
        )  # fmt: skip
        return ds_N

    def _check_width(self, intermediate: int) -> None:
        if intermediate % self.lanes:
            raise bad_value("I", f"a multiple of {self.lanes}, one vector", intermediate, "ask `activates` first")

    def multiply_rows(
        self,
        offs_E: Tensor,
        rows: Tensor,
        matrix_EIO: Tensor,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        """out[n] = rows[index[n]] @ matrix of n's expert (+ bias); rows past the last expert's are left as they are."""
        experts, depth, columns = matrix_EIO.shape
        count = out.shape[0]
        if 1 not in matrix_EIO.stride()[1:]:
            raise bad_value(
                "matrix_EIO", "an inner stride of 1", f"strides {matrix_EIO.stride()}", "copy it with .contiguous()"
            )
        if not has_lines(out):
            raise bad_value("out", "rows that are contiguous", f"strides {out.stride()}", "write to another tensor")
        self._library.amoeba_rows_f32(
            experts, address("offs_E", offs_E, torch.int32, (experts,)),
            _address_of_rows("rows", rows, depth, index_N, count), rows.stride(0),
            optional_address("index_N", index_N, torch.int64, (count,)),
            address_at_strides("matrix_EIO", matrix_EIO, torch.float32, (experts, depth, columns)),
            *matrix_EIO.stride(), optional_address("bias_EO", bias_EO, torch.float32, (experts, columns)),
            depth, columns, address_to_write("out", out, torch.float32, (count, columns)), out.stride(0),
            torch.get_num_threads(),
        )  # fmt: skip

    def multiplies_whole(self, codes: ScaledCodes) -> bool:
        """Whether `multiply_whole` takes them: on a CPU with VNNI in 512 bits, codes that stand for whole numbers."""
        of_bytes = codes.element == "e2m1" and codes.scale_values is not None and codes.block[1] in (16, 32)
        return self.in_whole_numbers and (of_bytes or (_kind(codes) == "blocks" and codes.element != "nf4"))

    def multiply_whole(
        self,
        offs_E: Tensor,
        rows: Tensor,
        codes: ScaledCodes,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        """As `multiply_rows`, out[n] = rows[index[n]] @ matrixᵀ (+ bias). Rows are rounded to 8 bits with a scale for
        each 32 columns: 1/254 of what is largest there. A row's results do not depend on others."""
        (experts, columns, depth), count = codes.shape, out.shape[0]
        start, strides, coding = _read("codes", codes, codes.shape)
        if not self.multiplies_whole(codes) or coding is None:
            raise bad_value("codes", "codes of whole numbers", codes.element, "ask `multiplies_whole` first")
        self._library.amoeba_rows_whole(
            experts, address("offs_E", offs_E, torch.int32, (experts,)), count if index_N is None else rows.shape[0],
            _address_of_rows("rows", rows, depth, index_N, count), rows.stride(0),
            optional_address("index_N", index_N, torch.int64, (count,)),
            start, *strides, ctypes.addressof(coding),
            optional_address("bias_EO", bias_EO, torch.float32, (experts, columns)), depth, columns,
            address_to_write("out", out, torch.float32, (count, columns)), out.stride(0), torch.get_num_threads(),
        )  # fmt: skip

    def multiply_rows_exactly(self, offs_E: Tensor, rows_NI: Tensor, matrix_EIO: Tensor, *, out: Tensor) -> None:
        """The same without bias: a row's results do not depend on other rows. Rows are fp32 or bf16, the matrix, too,
        with an inner stride of 1. Where it is contiguous along O, zeros in a row add nothing."""
        experts, depth, columns = matrix_EIO.shape
        count = out.shape[0]
        if 1 not in matrix_EIO.stride()[1:] or matrix_EIO.dtype not in _DTYPES:
            got = f"{matrix_EIO.dtype} with strides {matrix_EIO.stride()}"
            raise bad_value("matrix_EIO", "fp32 or bf16 with an inner stride of 1", got, "copy it with .contiguous()")
        half = rows_NI.dtype == matrix_EIO.dtype == torch.bfloat16
        in_tiles = (int(half and current_path() is CpuPath.AMX),) if matrix_EIO.dtype == torch.bfloat16 else ()
        rows_NI = rows_NI.float().contiguous()
        getattr(self._library, f"amoeba_exact_rows_{_DTYPES[matrix_EIO.dtype]}")(
            experts, address("offs_E", offs_E, torch.int32, (experts,)),
            address("rows_NI", rows_NI, torch.float32, (count, depth)), depth,
            address_at_strides("matrix_EIO", matrix_EIO, matrix_EIO.dtype, (experts, depth, columns)),
            *matrix_EIO.stride(), depth, columns, address("out", out, torch.float32, (count, columns)), columns,
            torch.get_num_threads(), *in_tiles,
        )  # fmt: skip

    def row_sums(self, x_ND: Tensor) -> Tensor:
        """Of each row, in an order that its length decides."""
        sums_N = torch.empty(x_ND.shape[0], dtype=torch.float32, device=CPU)
        self._library.amoeba_exact_row_sums(
            *x_ND.shape, address("x_ND", x_ND, torch.float32, tuple(x_ND.shape)),
            address_to_write("sums_N", sums_N, torch.float32, tuple(sums_N.shape)), torch.get_num_threads(),
        )  # fmt: skip
        return sums_N

    def values(self, function: ExactFunction, x: Tensor) -> Tensor:
        """Of each number of x, in fp32, whatever stands next to it."""
        out = torch.empty(x.shape, dtype=torch.float32, device=CPU)
        self._library.amoeba_exact_values(
            EXACT_FUNCTIONS.index(function), x.numel(), address("x", x, torch.float32, tuple(x.shape)),
            address("out", out, torch.float32, tuple(x.shape)), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def weight_gradient(
        self,
        offs_E: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        out: Tensor,
        left_index_N: Tensor | None = None,
        right_index_N: Tensor | None = None,
    ) -> None:
        """out_e (columns of left × columns of right) = Σ over e's rows of leftᵀ right, contiguous along right."""
        experts, left_columns, right_columns = out.shape
        count = next((i.shape[0] for i in (left_index_N, right_index_N) if i is not None), left.shape[0])
        if not has_lines(out):
            raise bad_value("out", "matrices contiguous along right", f"strides {out.stride()}", "swap left and right")
        self._library.amoeba_weight_gradient_f32(
            experts, address("offs_E", offs_E, torch.int32, (experts,)),
            _address_of_rows("left", left, left_columns, left_index_N, count), left.stride(0),
            optional_address("left_index_N", left_index_N, torch.int64, (count,)), left_columns,
            _address_of_rows("right", right, right_columns, right_index_N, count), right.stride(0),
            optional_address("right_index_N", right_index_N, torch.int64, (count,)), right_columns,
            address_to_write("out", out, torch.float32, (experts, left_columns, right_columns)),
            out.stride(0), out.stride(1), torch.get_num_threads(),
        )  # fmt: skip

    def decode(
        self,
        x_TH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        gate_up_EJH: Tensor | ScaledCodes,
        down_EHI: Tensor | ScaledCodes,
        gate_up_bias_EJ: Tensor | None,
        down_bias_EH: Tensor | None,
        activation: Activation,
        added_NJ: Tensor | None = None,
        key_TK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The whole layer for a few tokens in one call, in fp32: y (T, H).

        Weights are fp32 or bf16, contiguous along the last dimension, or both are codes.
        added_NJ: what each slot's h gets on top; then the activations of the slots (N, I) are returned with y, where
        those of sentinels' slots hold anything.
        key_TK: other numbers for the experts, in whose order they are added up.
        """
        tokens, hidden = x_TH.shape
        top_k, (experts, width, _), intermediate = expert_TK.shape[1], gate_up_EJH.shape, down_EHI.shape[2]
        if width != intermediate and width != 2 * intermediate:
            raise bad_value("gate_up_EJH", f"J = I or 2I with I = {intermediate}", width, "check activation.gated")
        slots = tokens * top_k
        kind = _kind(down_EHI)
        if kind is None or _kind(gate_up_EJH) != kind:
            expected = "float32, bfloat16, or quantised weights of the same kind"
            got = " and ".join(str(getattr(each, "dtype", "quantised")) for each in (gate_up_EJH, down_EHI))
            raise bad_value("gate_up_EJH and down_EHI", expected, got, "cast the weights")
        run = getattr(self._library, f"amoeba_decode_{kind}")
        gate_up, gate_up_strides, gate_up_coding = _read("gate_up_EJH", gate_up_EJH, (experts, width, hidden))
        down, down_strides, down_coding = _read("down_EHI", down_EHI, (experts, hidden, intermediate))
        # h, a and a list of slots in 8-byte integers
        scratch = torch.empty(slots * (width + intermediate + 2), dtype=torch.float32, device=CPU)
        y_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=CPU)
        order = address("scratch", scratch, torch.float32, (slots * (width + intermediate + 2),))
        run(
            tokens, top_k, experts, hidden, intermediate, width,
            address_of_lines("x_TH", x_TH, torch.float32, (tokens, hidden)), x_TH.stride()[0],
            address("expert_TK", expert_TK, torch.int64, (tokens, top_k)),
            optional_address("key_TK", key_TK, torch.int64, (tokens, top_k)),
            address("weight_TK", weight_TK, torch.float32, (tokens, top_k)),
            gate_up, *gate_up_strides, None if gate_up_coding is None else ctypes.addressof(gate_up_coding),
            optional_address("gate_up_bias_EJ", gate_up_bias_EJ, torch.float32, (experts, width)),
            optional_address("added_NJ", added_NJ, torch.float32, (slots, width)),
            down, *down_strides, None if down_coding is None else ctypes.addressof(down_coding),
            optional_address("down_bias_EH", down_bias_EH, torch.float32, (experts, hidden)),
            activation_number(activation.kind), activation.interleaved,
            activation.alpha, activation.limit, activation.up_shift,
            order + 8 * slots, order + 4 * slots * (width + 2), order,
            address("y_TH", y_TH, torch.float32, (tokens, hidden)), torch.get_num_threads(),
        )  # fmt: skip
        if added_NJ is None:
            return y_TH, None
        return y_TH, scratch[slots * (width + 2) :].view(slots, intermediate)

    def dequantise(self, codes: ScaledCodes, expert: int, *, out: Tensor) -> None:
        """out (O, I), in fp32 or bf16: of one expert each code · scale in fp32, rounded."""
        experts, rows, columns = codes.shape
        if out.dtype not in _DTYPES or not 0 <= expert < experts:
            got = f"{out.dtype}, expert {expert}"
            raise bad_value("out", f"float32 or bfloat16, for one of {experts} experts", got, "convert it afterwards")
        of_expert, coding = codes.code_EOI[expert], codes.coding()
        run = getattr(self._library, f"amoeba_dequantise_{_DTYPES[out.dtype]}")
        run(
            address_at_strides("codes", of_expert, torch.uint8, tuple(of_expert.shape)), of_expert.shape[1],
            ctypes.addressof(coding), expert, rows, columns,
            address("out", out, out.dtype, (rows, columns)), torch.get_num_threads(),
        )  # fmt: skip

    def sum_decoded(self, rows_NH: Tensor, expert_TK: Tensor, weight_TK: Tensor, experts: int) -> Tensor:
        """y (T, H) as `decode` gives it, bit for bit, of its rows for the slots as tokens with weight 1 each.

        Rows of slots whose expert is not in [0, experts) hold anything.
        """
        (tokens, top_k), (slots, hidden) = expert_TK.shape, rows_NH.shape
        y_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=CPU)
        order = torch.empty(slots, dtype=torch.int64, device=CPU)
        self._library.amoeba_sum_decoded(
            tokens, top_k, experts, hidden,
            address("expert_TK", expert_TK, torch.int64, (tokens, top_k)),
            address("weight_TK", weight_TK, torch.float32, (tokens, top_k)),
            address_of_lines("rows_NH", rows_NH, torch.float32, (tokens * top_k, hidden)), rows_NH.stride(0),
            address("order", order, torch.int64, (slots,)),
            address("y_TH", y_TH, torch.float32, (tokens, hidden)),
        )  # fmt: skip
        return y_TH


@functools.cache
def _load() -> Core | CoreUnavailable:
    try:
        return with_library("core", Core)
    except CoreUnavailable as error:
        if os.environ.get("AMOEBA_CPU_CORE") != "0":  # else it was asked for
            logger.warning("torch computes experts on the CPU, which is slower: %s", error)
        return error


def load_core() -> Core:
    loaded = _load()
    if isinstance(loaded, CoreUnavailable):
        raise loaded
    return loaded


@constant_when_traced
def why_no_core() -> str | None:
    """None where the core runs; it is compiled by the first call."""
    loaded = _load()
    return str(loaded) if isinstance(loaded, CoreUnavailable) else None


def _kind(weight: Tensor | ScaledCodes) -> str | None:
    """As the core's functions name it; None for what it does not read."""
    if not isinstance(weight, ScaledCodes):
        return _DTYPES.get(weight.dtype)
    return weight.element if weight.element in ("e4m3", "e2m1") else "blocks"


def _read(
    name: str, weight: Tensor | ScaledCodes, shape: tuple[int, int, int]
) -> tuple[int, tuple[int, int], CCoding | None]:
    """Where it lies, the strides of experts and rows, and what codes stand for."""
    if not isinstance(weight, ScaledCodes):
        stride_e, stride_row, _ = weight.stride()
        return address_of_lines(name, weight, weight.dtype, shape), (stride_e, stride_row), None
    if weight.shape != shape:
        raise bad_value(name, f"quantised weights of shape {shape}", weight.shape, "check hidden and intermediate")
    stride_e, stride_row, _ = weight.code_EOI.stride()
    start = address_of_lines(name, weight.code_EOI, torch.uint8, tuple(weight.code_EOI.shape))
    return start, (stride_e, stride_row), weight.coding()


def _address_of_rows(name: str, rows: Tensor, columns: int, index: Tensor | None, count: int) -> int:
    """Of as many rows as there are, which without an index are at least those that are asked for."""
    if index is None and rows.shape[0] < count:
        raise bad_value(name, f"at least {count} rows", rows.shape[0], "pass a row for each row of the result")
    return address_of_lines(name, rows, torch.float32, (rows.shape[0], columns))
