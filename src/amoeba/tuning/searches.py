"""What there is to search for a layer: each kernel that it launches and whose configuration is a choice.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

    for search in searches(shape, torch.float16, device, head_sizes=(128,)): ...

Tensors are made when the first search of a layer begins, and belong to its searches alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from amoeba.backends.triton import DECODE_TOKENS
from amoeba.backends.triton_rows import why_not_hopper
from amoeba.bench.workload import Shape
from amoeba.core.config import Activation
from amoeba.core.problem import Problem
from amoeba.core.weights import ExpertWeights
from amoeba.kernels import attention
from amoeba.kernels.attention import tile as attention_tile
from amoeba.kernels.decode import can_overlap, decode
from amoeba.kernels.decode.configuration import Layer as DecodedLayer
from amoeba.kernels.decode.configuration import candidates as decode_candidates
from amoeba.kernels.decode.configuration import decode_key
from amoeba.kernels.down_backward import down_backward
from amoeba.kernels.grouped_gemm import multiply_rows, multiply_rows_activated
from amoeba.kernels.sort import sort_rows
from amoeba.kernels.tile_sizes import Product, Role, candidates, capability_of, tile_key
from amoeba.kernels.weight_gradient import heaviest_first, weight_gradient
from amoeba.tuning.search import Run, Search

DECODED = (1, 8, 64)  # numbers of tokens, where the shape has more
ATTENTION_TOKENS, QUERY_HEADS, KEY_HEADS, DOCUMENTS = 8192, 16, 4, 8
_SEED = 0


def searches(shape: Shape, dtype: torch.dtype, device: torch.device, head_sizes: Sequence[int]) -> list[Search]:
    """Those of training and prefill first, then decoding, then attention."""
    found: list[Search] = []
    if shape.tokens > DECODE_TOKENS and not _served_by_hopper(shape, dtype, device):
        found += _products(_Inputs(shape, dtype, device))
    tokens = DECODED if shape.tokens > DECODE_TOKENS else (shape.tokens,)
    found += [_decoding(_Inputs(replace(shape, tokens=few), dtype, device)) for few in tokens]
    if dtype != torch.float32:  # which attention does not serve
        found += [
            _attention(kernel, size, dtype, device)
            for size in head_sizes
            if size in attention_tile.HEAD_SIZES
            for kernel in attention_tile.KERNELS
        ]
    return found


def _served_by_hopper(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """By kernels that have one configuration."""
    return why_not_hopper(_Inputs(replace(shape, tokens=1, experts=1, top_k=1), dtype, device).problem) is None


class _Inputs:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    @cached_property
    def problem(self) -> Problem:
        shape, generator = self.shape, torch.Generator(self.device).manual_seed(_SEED)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=self.dtype, device=self.device)

        size = shape.tokens, shape.experts
        score_TE = torch.rand(size, generator=generator, dtype=torch.float32, device=self.device)
        weight_TK, expert_TK = score_TE.topk(shape.top_k)
        gate_up_EJH = draw(shape.experts, 2 * shape.intermediate, shape.hidden).mul_(shape.hidden**-0.5)
        down_EHI = draw(shape.experts, shape.hidden, shape.intermediate).mul_(shape.intermediate**-0.5)
        weights = ExpertWeights(gate_up_EJH, down_EHI, activation=Activation())
        return Problem(draw(shape.tokens, shape.hidden), expert_TK, weight_TK, weights)

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """order_N, slot_row_N, offs_E."""
        return sort_rows(self.problem.expert_TK, self.shape.experts)

    def new_rows(self, width: int) -> Tensor:
        return torch.empty((self.shape.rows, width), dtype=self.dtype, device=self.device)

    def random_rows(self, width: int) -> Tensor:
        return self.new_rows(width).normal_(generator=torch.Generator(self.device).manual_seed(_SEED))


def _products(inputs: _Inputs) -> list[Search]:
    H, I = inputs.shape.hidden, inputs.shape.intermediate
    # role, reduction and columns as the launchers ask for them, and what makes the run
    kinds: tuple[tuple[Role, int, int, Callable[[_Inputs], Run]], ...] = (
        ("up", H, 2 * I, _up),
        ("product", I, H, _down),
        ("down_backward", H, I, _down_backward),
        ("product", 2 * I, H, _rows_gradient),
        ("weight_gradient", H, I, _down_gradient),
        ("weight_gradient", 2 * I, H, _up_gradient),
    )
    found = []
    for role, reduction, columns, make in kinds:
        product = Product(inputs.shape.rows, inputs.shape.experts, reduction, columns, inputs.dtype)
        allowed = candidates(role, product, capability_of(inputs.device))
        found.append(Search(tile_key(role, product), inputs.dtype, allowed, partial(make, inputs)))
    return found


def _up(inputs: _Inputs) -> Run:
    problem, (order_N, _, offs_E) = inputs.problem, inputs.maps
    weights, top_k = problem.weights, inputs.shape.top_k
    h_NJ, a_NI = inputs.new_rows(2 * inputs.shape.intermediate), inputs.new_rows(inputs.shape.intermediate)

    def run(chosen: Any) -> Sequence[Tensor]:
        multiply_rows_activated(
            problem.x_TH, weights.gate_up_EJH, offs_E, weights.activation, h_NJ, a_NI,
            order_N=order_N, top_k=top_k, configuration=chosen,
        )  # fmt: skip
        return h_NJ, a_NI

    return run


def _down(inputs: _Inputs) -> Run:
    a_NI, y_NH = inputs.random_rows(inputs.shape.intermediate), inputs.new_rows(inputs.shape.hidden)
    return _product(inputs, a_NI, inputs.problem.weights.down_EHI.mT, y_NH)


def _rows_gradient(inputs: _Inputs) -> Run:
    dh_NJ, dx_NH = inputs.random_rows(2 * inputs.shape.intermediate), inputs.new_rows(inputs.shape.hidden)
    return _product(inputs, dh_NJ, inputs.problem.weights.gate_up_EJH, dx_NH)


def _product(inputs: _Inputs, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> Run:
    offs_E = inputs.maps[2]
    return lambda chosen: (multiply_rows(rows_NI, matrix_EIO, offs_E, out_NO, configuration=chosen),)


def _down_backward(inputs: _Inputs) -> Run:
    problem, (order_N, _, offs_E) = inputs.problem, inputs.maps
    weights, top_k = problem.weights, inputs.shape.top_k
    h_NJ = inputs.random_rows(2 * inputs.shape.intermediate)
    dh_NJ, scaled_a_NI = torch.empty_like(h_NJ), inputs.new_rows(inputs.shape.intermediate)

    def run(chosen: Any) -> Sequence[Tensor]:
        ds_N = down_backward(
            problem.x_TH, weights.down_EHI, offs_E, h_NJ, problem.weight_TK, weights.activation, dh_NJ, scaled_a_NI,
            order_N, top_k=top_k, configuration=chosen,
        )  # fmt: skip
        return dh_NJ, scaled_a_NI, ds_N

    return run


def _down_gradient(inputs: _Inputs) -> Run:
    order_N = inputs.maps[0]
    a_NI, out_EHI = inputs.random_rows(inputs.shape.intermediate), torch.empty_like(inputs.problem.weights.down_EHI)
    return _gradient(inputs, inputs.problem.x_TH, a_NI, out_EHI, left_order_N=order_N)


def _up_gradient(inputs: _Inputs) -> Run:
    dh_NJ = inputs.random_rows(2 * inputs.shape.intermediate)
    out_EJH = torch.empty_like(inputs.problem.weights.gate_up_EJH)
    return _gradient(inputs, dh_NJ, inputs.problem.x_TH, out_EJH, right_order_N=inputs.maps[0])


def _gradient(inputs: _Inputs, left: Tensor, right: Tensor, out_EOI: Tensor, **order: Tensor) -> Run:
    offs_E, top_k = inputs.maps[2], inputs.shape.top_k
    options: dict[str, Any] = {"top_k": top_k, "heaviest_E": heaviest_first(offs_E), **order}
    return lambda chosen: (weight_gradient(left, right, offs_E, out_EOI, **options, configuration=chosen),)


def _decoding(inputs: _Inputs) -> Search:
    shape, device, dtype = inputs.shape, inputs.device, inputs.dtype
    sizes = shape.tokens, shape.top_k, shape.experts, shape.hidden, shape.intermediate
    layer = DecodedLayer(*sizes, gated=True, itemsize=dtype.itemsize, overlap=can_overlap(device))
    allowed = decode_candidates(layer, capability_of(device))

    def make() -> Run:
        return lambda chosen: (decode(inputs.problem, configuration=chosen),)

    return Search(decode_key(dtype, layer), dtype, allowed, make)


def _attention(kernel: attention_tile.Kernel, size: int, dtype: torch.dtype, device: torch.device) -> Search:
    allowed = attention_tile.candidates(kernel, size, dtype, capability_of(device))
    make = partial(_attention_run, kernel, size, dtype, device)
    return Search(attention_tile.attention_key(kernel, size, dtype), dtype, allowed, make)


def _attention_run(kernel: attention_tile.Kernel, size: int, dtype: torch.dtype, device: torch.device) -> Run:
    generator = torch.Generator(device).manual_seed(_SEED)

    def draw(heads: int) -> Tensor:
        return torch.randn((ATTENTION_TOKENS, heads, size), generator=generator, dtype=dtype, device=device)

    q, k, v, dy = draw(QUERY_HEADS), draw(KEY_HEADS), draw(KEY_HEADS), draw(QUERY_HEADS)
    ends = torch.arange(0, ATTENTION_TOKENS + 1, ATTENTION_TOKENS // DOCUMENTS, dtype=torch.int32, device=device)
    scale = 1 / math.sqrt(size)
    if kernel == "forward":
        return lambda chosen: attention.forward(q, k, v, ends, scale, -1, tile=chosen)
    y, logsumexp = attention.forward(q, k, v, ends, scale, -1)
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(logsumexp)
    scalars = attention.scalars_of(logsumexp, delta, ends, ATTENTION_TOKENS, scale, -1)
    attention.query_gradient(q, k, v, y, dy, dq, scalars)  # which writes delta

    def run(chosen: Any) -> Sequence[Tensor]:
        if kernel == "query_gradient":
            attention.query_gradient(q, k, v, y, dy, dq, scalars, tile=chosen)
            return dq, delta
        attention.key_gradient(q, k, v, dy, dk, dv, scalars, tile=chosen)
        return dk, dv

    return run
