"""The C++ core as Python functions over tensors. Tensors are checked here, before a pointer is taken.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · O out

    core = load_core()
    core.multiply_rows(offs_E, rows_NI, matrix_EIO, out=out_NO)
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from amoeba.config import Activation, ActivationKind
from amoeba.cpu.build import CoreUnavailable, compiled_core, load
from amoeba.tracing import constant_when_traced

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_KINDS = {kind: number for number, kind in enumerate(get_args(ActivationKind))}  # the order of `enum Kind`

# fmt: off
_SIGNATURES = {
    "amoeba_rows_f32": (
        _INT64, _POINTER, _POINTER, _INT64, _POINTER,       # experts, offs, rows, stride, index
        _POINTER, _INT64, _INT64, _INT64, _POINTER,         # matrix, its strides, bias
        _INT64, _INT64, _POINTER, _INT64, _INT,             # depth, columns, out, stride, threads
    ),
    "amoeba_weight_gradient_f32": (
        _INT64, _POINTER,                                   # experts, offs
        _POINTER, _INT64, _POINTER, _INT64,                 # left, stride, index, columns
        _POINTER, _INT64, _POINTER, _INT64,                 # right, stride, index, columns
        _POINTER, _INT64, _INT64, _INT,                     # gradient, its strides, threads
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
    **dict.fromkeys(("amoeba_decode_f32", "amoeba_decode_bf16"), (
        _INT64, _INT64, _INT64, _INT64, _INT64, _INT64,     # tokens, top_k, experts, hidden, intermediate, width
        _POINTER, _INT64, _POINTER, _POINTER,               # x, stride, expert ids, weights
        _POINTER, _INT64, _INT64, _POINTER, _POINTER,       # gate_up, its strides, bias, added rows
        _POINTER, _INT64, _INT64, _POINTER,                 # down, its strides, bias
        _INT, _INT, _FLOAT, _FLOAT, _FLOAT,                 # kind, interleaved, alpha, limit, up_shift
        _POINTER, _POINTER, _POINTER, _POINTER, _INT,       # scratch h, a and order, y, threads
    )),
}
# fmt: on


class Core:
    """Handle of the loaded library."""

    def __init__(self, file: Path) -> None:
        library = load(file, {name: (None, arguments) for name, arguments in _SIGNATURES.items()})
        self.lanes: int = library.amoeba_lanes()
        self._rows = library.amoeba_rows_f32
        self._weight_gradient = library.amoeba_weight_gradient_f32
        self._swiglu = library.amoeba_swiglu_f32
        self._swiglu_backward = library.amoeba_swiglu_backward_f32
        self._decode = {torch.float32: library.amoeba_decode_f32, torch.bfloat16: library.amoeba_decode_bf16}

    def activates(self, activation: Activation, intermediate: int) -> bool:
        """Whether the core has this activation: silu-gated, concatenated, whole vectors."""
        concatenated = activation.gated and not activation.interleaved
        return concatenated and activation.kind == "silu" and intermediate % self.lanes == 0

    def activate(self, h_NJ: Tensor, scale_N: Tensor, activation: Activation, *, out: Tensor) -> None:
        """out = scale · act(h)."""
        rows, intermediate = out.shape
        assert h_NJ.shape == (rows, 2 * intermediate) and scale_N.shape == (rows,)
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (h_NJ, scale_N, out))
        self._swiglu(
            rows, intermediate, h_NJ.data_ptr(), scale_N.data_ptr(),
            activation.alpha, activation.limit, activation.up_shift, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

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
        assert h_NJ.shape == dh_NJ.shape == (rows, 2 * intermediate) and scale_N.shape == (rows,)
        assert scaled_a_NI is None or scaled_a_NI.shape == da_NI.shape
        tensors = (da_NI, h_NJ, scale_N, dh_NJ, *(() if scaled_a_NI is None else (scaled_a_NI,)))
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
        ds_N = torch.empty(rows)
        self._swiglu_backward(
            rows, intermediate, da_NI.data_ptr(), h_NJ.data_ptr(), scale_N.data_ptr(),
            activation.alpha, activation.limit, activation.up_shift,
            dh_NJ.data_ptr(), _address(scaled_a_NI), ds_N.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return ds_N

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
        _check_offs(offs_E, experts)
        _check_rows(rows, depth, index_N, out.shape[0])
        _check_rows(out, columns, None, out.shape[0])
        assert 1 in matrix_EIO.stride()[1:], f"one inner stride must be 1, strides are {matrix_EIO.stride()}"
        assert bias_EO is None or (bias_EO.shape == (experts, columns) and bias_EO.is_contiguous())
        self._rows(
            experts, offs_E.data_ptr(), rows.data_ptr(), rows.stride(0), _address(index_N),
            matrix_EIO.data_ptr(), *matrix_EIO.stride(), _address(bias_EO),
            depth, columns, out.data_ptr(), out.stride(0), torch.get_num_threads(),
        )  # fmt: skip

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
        _check_offs(offs_E, experts)
        rows = next((i.shape[0] for i in (left_index_N, right_index_N) if i is not None), left.shape[0])
        _check_rows(left, left_columns, left_index_N, rows)
        _check_rows(right, right_columns, right_index_N, rows)
        assert out.stride(2) == 1
        self._weight_gradient(
            experts, offs_E.data_ptr(),
            left.data_ptr(), left.stride(0), _address(left_index_N), left_columns,
            right.data_ptr(), right.stride(0), _address(right_index_N), right_columns,
            out.data_ptr(), out.stride(0), out.stride(1), torch.get_num_threads(),
        )  # fmt: skip

    def decode(
        self,
        x_TH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        gate_up_EJH: Tensor,
        down_EHI: Tensor,
        gate_up_bias_EJ: Tensor | None,
        down_bias_EH: Tensor | None,
        activation: Activation,
        added_NJ: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The whole layer for a few tokens in one call, in fp32: y (T, H), and the activations of the slots (N, I).

        Weights are fp32 or bf16, contiguous along the last dimension. Activations of nobody's slots hold anything.
        added_NJ: what each slot's h gets on top.
        """
        tokens, hidden = x_TH.shape
        top_k, (experts, width, _), intermediate = expert_TK.shape[1], gate_up_EJH.shape, down_EHI.shape[2]
        assert x_TH.stride(1) == gate_up_EJH.stride(2) == down_EHI.stride(2) == 1
        assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int64
        assert weight_TK.is_contiguous() and weight_TK.dtype == x_TH.dtype == torch.float32
        assert gate_up_EJH.dtype == down_EHI.dtype
        for added in (gate_up_bias_EJ, down_bias_EH, added_NJ):
            assert added is None or (added.is_contiguous() and added.dtype == torch.float32)
        assert added_NJ is None or added_NJ.shape == (tokens * top_k, width)
        slots = tokens * top_k
        scratch = torch.empty(slots * (width + intermediate + 2))  # h, a and a list of slots in 8-byte integers
        y_TH = torch.empty((tokens, hidden))
        h = scratch.data_ptr()
        self._decode[down_EHI.dtype](
            tokens, top_k, experts, hidden, intermediate, width,
            x_TH.data_ptr(), x_TH.stride(0), expert_TK.data_ptr(), weight_TK.data_ptr(),
            gate_up_EJH.data_ptr(), gate_up_EJH.stride(0), gate_up_EJH.stride(1), _address(gate_up_bias_EJ),
            _address(added_NJ),
            down_EHI.data_ptr(), down_EHI.stride(0), down_EHI.stride(1), _address(down_bias_EH),
            _KINDS[activation.kind], activation.interleaved, activation.alpha, activation.limit, activation.up_shift,
            h + 8 * slots, h + 4 * slots * (width + 2), h, y_TH.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y_TH, scratch[slots * (width + 2) :].view(slots, intermediate)


@functools.cache
def _load() -> Core | CoreUnavailable:
    try:
        return Core(compiled_core())
    except CoreUnavailable as error:
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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_offs(offs_E: Tensor, experts: int) -> None:
    assert offs_E.shape == (experts,) and offs_E.dtype == torch.int32 and offs_E.is_contiguous()


def _check_rows(rows: Tensor, columns: int, index: Tensor | None, count: int) -> None:
    assert rows.dtype == torch.float32 and rows.device.type == "cpu", (
        f"fp32 on the CPU, got {rows.dtype}, {rows.device}"
    )
    assert rows.dim() == 2 and rows.shape[1] == columns and (rows.stride(1) == 1 or columns == 1)
    if index is None:
        assert rows.shape[0] >= count
    else:
        assert index.shape == (count,) and index.dtype == torch.int64 and index.is_contiguous()
