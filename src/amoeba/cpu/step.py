"""A decode step of a whole decoder in the C++ core (csrc/step.cpp), and the structures that it reads.

B rows · H hidden · Q query heads · G key and value heads · D of a head · L slots of the cache · V vocabulary

    model = CStepModel(...)                       # filled in by decoding/cpu_step.py
    step = Stepper(model, kept, streamed)         # kept: all tensors and structures that it points to
    step.run(position_B1, first_B, slot=17, tokens_B1=token_B1, logits_BV=logits_BV)

Streamed experts are read where they lie in their slots. A call ends before a layer some of whose experts are in none;
Python has them read, and another call goes on from there. So a step without misses is one call.

The fields stand in the order of csrc/step.cpp and csrc/step_products.h. A weight may be fp32 or bf16 as it is stored,
packed bf16 or int8 tiles, or codes with scales or ggml's blocks (`ScaledCodes`).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from ctypes import Structure, c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amoeba.core.config import Activation, RouterConfig
from amoeba.core.errors import bad_value
from amoeba.cpu.build import load, with_library
from amoeba.cpu.node_library import activation_number
from amoeba.cpu.pointers import address, address_of_lines, optional_address
from amoeba.cpu.weights import CCoding, PackedWeights, ScaledCodes, packing_address

# `enum MatrixKind` in csrc/step_products.h
_ROWS = {torch.float32: 0, torch.bfloat16: 1}
_CODES, _BLOCKS = {"e4m3": 2, "e2m1": 3}, 4
_TILES = {"bf16": 5, "int8": 6}
_COLUMNS = {torch.float32: 7, torch.bfloat16: 8}
_LORA_RANKS = 16  # `LORA_RANKS` in csrc/step_products.h
# `enum HeadNorm`, `Rotation`, `Score` and `GroupScore` in csrc/step.cpp
HEAD_NORMS = {None: 0, "heads": 1, "rows": 2}
ROTATIONS = {None: 0, "halves": 1, "pairs": 2, "pairs to halves": 3}
SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}
_GROUP_SCORES = {"top2_sum": 0, "max": 1}


# Of `StepModel`: what an exact step rounds to bf16
EXACT_FLAGS = "half", "norm_rounds_first", "rounds_logits", "rounds_routing", "rounds_experts"


class CStepMatrix(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("kind", "out", "in_")),
        ("data", c_void_p),
        *((name, c_int64) for name in ("stride_e", "stride_row")),
        *((name, c_void_p) for name in ("scale", "sum", "bias")),
        *((name, c_int64) for name in ("bias_bf16", "bias_stride")),
        ("coding", CCoding),
        ("rank", c_int64),
        *((name, c_void_p) for name in ("lora_a", "lora_b")),
        *((name, c_int64) for name in ("lora_parts", "lora_half")),
        ("lora_scale", c_double),
    ]


class CStepNorm(Structure):
    _fields_ = [("weight", c_void_p), ("eps", c_double)]


class CStepExperts(Structure):
    _fields_ = [
        *((name, CStepMatrix) for name in ("gate_up", "down")),
        *((name, c_int64) for name in ("intermediate", "kind", "gated", "interleaved")),
        *((name, c_double) for name in ("alpha", "limit", "up_shift")),
    ]


class CStepRouter(Structure):
    _fields_ = [
        ("weight", CStepMatrix),
        *((name, c_int64) for name in ("top_k", "score", "renormalize", "n_group", "topk_group", "group_score")),
        ("scaling_factor", c_double),
        ("selection_bias", c_void_p),
    ]


class CStepLayer(Structure):
    _fields_ = [
        *((name, CStepNorm) for name in ("before_attention", "before_experts")),
        *((name, CStepMatrix) for name in ("queries", "keys", "values", "output")),
        *((name, CStepMatrix) for name in ("low_queries", "to_latents", "from_latents")),
        *((name, CStepNorm) for name in ("query_norm", "key_norm")),
        ("head_norm", c_int64),
        *((name, c_double) for name in ("clip", "scale")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("rotated", "window")),
        *((name, c_void_p) for name in ("sinks", "key_cache", "value_cache")),
        *((name, c_int64) for name in ("cache_bf16", "cache_row", "cache_head")),
        ("router", CStepRouter),
        *((name, CStepExperts) for name in ("experts", "shared")),
        *((name, c_void_p) for name in ("shared_gate", "slot_of", "chosen")),
        ("residual", c_double),
    ]


class CStepModel(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in ("rows", "hidden", "vocabulary", "query_heads", "key_heads", "head_size", "length")
        ),
        ("layer_count", c_int64),
        ("layers", c_void_p),
        ("embedding", CStepMatrix),
        ("rotation", c_int64),
        ("norm", CStepNorm),
        ("head", CStepMatrix),
        *((name, c_double) for name in ("embedding_scale", "logits_scale")),
        *((name, c_int64) for name in EXACT_FLAGS),
    ]


class CStepCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "position", "first")),
        *((name, c_int64) for name in ("first_layer", "last_layer", "resumes")),
        *((name, c_void_p) for name in ("x", "logits", "chosen")),
    ]


_SIGNATURES = {
    f"amoeba_{name}_{function}": signature
    for name in ("step", "exact_step")
    for function, signature in (
        ("new", (c_void_p, (c_void_p, c_int))),
        ("delete", (None, (c_void_p,))),
        ("run", (c_int64, (c_void_p, c_void_p))),
    )
}


def _open(file: Path) -> ctypes.CDLL:
    return load(file, _SIGNATURES)


@functools.cache
def load_step() -> ctypes.CDLL:
    """CoreUnavailable where it cannot be compiled."""
    return with_library("step", _open)


def matrix(
    name: str,
    weight: Tensor | PackedWeights | ScaledCodes,
    bias_EO: Tensor | None,
    kept: list[Any],
) -> CStepMatrix:
    """weight: (O, I) or (E, O, I) in fp32 or bf16, contiguous along I, or packed, or quantised; for an exact step also
    contiguous along O. bias_EO: fp32 or bf16. kept: gets what it points to."""
    c = CStepMatrix()
    if isinstance(weight, Tensor):
        weight = weight[None] if weight.dim() == 2 else weight
        if weight.dtype not in _ROWS:
            raise bad_value(name, "float32 or bfloat16", weight.dtype, "convert the model")
        experts, c.out, c.in_ = weight.shape
        by_columns = weight.stride(2) != 1 and weight.stride(1) == 1
        c.kind, lines = (_COLUMNS if by_columns else _ROWS)[weight.dtype], weight.mT if by_columns else weight
        c.data = address_of_lines(name, lines, weight.dtype, tuple(lines.shape))
        c.stride_e, c.stride_row, _ = lines.stride()
    elif isinstance(weight, PackedWeights):
        experts, c.out, c.in_, packing = weight.experts, weight.out_features, weight.in_features, weight.forward
        c.kind, c.data = _TILES[weight.kind], packing_address(name, weight.kind, experts, packing)
        c.scale = optional_address(name, packing.column_scale_EC, torch.float32, (experts, c.out))
        c.sum = optional_address(name, packing.sum_EC, torch.int32, (experts, c.out))
    else:
        experts, c.out, c.in_ = weight.shape
        c.kind = _CODES.get(weight.element, _BLOCKS)
        c.data = address_of_lines(name, weight.code_EOI, torch.uint8, tuple(weight.code_EOI.shape))
        c.stride_e, c.stride_row, _ = weight.code_EOI.stride()
        c.coding = weight.coding()
    if bias_EO is not None:
        kind = torch.bfloat16 if bias_EO.dtype == torch.bfloat16 else torch.float32
        c.bias = address_of_lines(f"bias of {name}", bias_EO, kind, (experts, c.out))
        c.bias_bf16, c.bias_stride = kind == torch.bfloat16, bias_EO.stride(0)
    kept += [weight, bias_EO]
    return c


def adapt(c: CStepMatrix, a_ERI: Tensor, b_EOR: Tensor, kept: list[Any]) -> None:
    """Adds B (A x) to the products with a matrix. The factors are copied to fp32, their rank padded with zeros."""
    experts, rank, _ = a_ERI.shape
    more = -rank % _LORA_RANKS
    a_ERI = nn.functional.pad(a_ERI.detach().float(), (0, 0, 0, more)).contiguous()
    b_EOR = nn.functional.pad(b_EOR.detach().float(), (0, more)).contiguous()
    c.rank = rank + more
    c.lora_a = address("lora_a", a_ERI, torch.float32, (experts, c.rank, c.in_))
    c.lora_b = address("lora_b", b_EOR, torch.float32, (experts, c.out, c.rank))
    kept += [a_ERI, b_EOR]


def adapt_exactly(
    c: CStepMatrix, a_ERI: Tensor, b_EOR: Tensor, scaling: float, kept: list[Any], *, parts: int, half: bool
) -> None:
    """Of an exact step. parts: 0 for PEFT's layer, 1 for experts, 2 for those whose gate and up have an A each, one
    below the other in a_ERI. half: what PEFT's factors give is rounded to bf16."""
    a_ERI, b_EOR = (each.detach().float().contiguous() for each in (a_ERI, b_EOR))
    experts, _, c.rank = b_EOR.shape
    c.lora_a = address("lora_a", a_ERI, torch.float32, (experts, c.rank * max(1, parts), c.in_))
    c.lora_b = address("lora_b", b_EOR, torch.float32, (experts, c.out, c.rank))
    c.lora_parts, c.lora_half, c.lora_scale = parts, half, scaling
    kept += [a_ERI, b_EOR]


def norm(name: str, weight: Tensor, eps: float, kept: list[Any]) -> CStepNorm:
    kept.append(weight)
    return CStepNorm(address(name, weight, torch.float32, tuple(weight.shape)), eps)


def experts(gate_up: CStepMatrix, down: CStepMatrix, activation: Activation) -> CStepExperts:
    width = activation.width(down.in_)
    if gate_up.out != width or gate_up.in_ != down.out:
        got = (gate_up.out, gate_up.in_)
        raise bad_value("gate_up", f"shape {(width, down.out)}", got, "check activation.gated")
    return CStepExperts(
        gate_up, down, down.in_, activation_number(activation.kind), activation.gated, activation.interleaved,
        activation.alpha, activation.limit, activation.up_shift,
    )  # fmt: skip


def router(weight: CStepMatrix, config: RouterConfig, selection_bias_E: Tensor | None, kept: list[Any]) -> CStepRouter:
    kept.append(selection_bias_E)
    return CStepRouter(
        weight, config.top_k, SCORES[config.score], config.renormalize, config.n_group, config.topk_group,
        _GROUP_SCORES[config.group_score], config.scaling_factor,
        optional_address("selection_bias_E", selection_bias_E, torch.float32, (config.num_experts,)),
    )  # fmt: skip


class StreamedLayer(Protocol):
    """A layer whose experts are read from a disk into slots, as the step needs it.

    slot_of_E: int64, -1 where an expert is in none; brought up to date by `alone`.
    """

    @property
    def slot_of_E(self) -> Tensor: ...
    def alone(self) -> AbstractContextManager[None]:
        """Of the memory of this layer, which nothing else changes meanwhile."""

    def acquire(self, ids: Sequence[int], tokens: int) -> Generator[dict[int, int], None, None]:
        """Expert -> slot, until all of these have been there, each until the next are asked for."""

    def note_use(self, ids: Sequence[int], tokens: int) -> None:
        """A pass found all of these there."""


class Stepper:
    """Of one model and one cache. kept: what the model points to. streamed: the streamed layers, by number. exact: with
    the bits of exact mode."""

    def __init__(
        self,
        model: CStepModel,
        kept: list[Any],
        streamed: dict[int, tuple[StreamedLayer, Tensor]],
        *,
        exact: bool = False,
    ) -> None:
        self.model, self._kept, self._streamed = model, kept, streamed
        self.threads = torch.get_num_threads()
        name, library = "exact_step" if exact else "step", load_step()
        new, delete, self._run_in_core = (
            getattr(library, f"amoeba_{name}_{function}") for function in ("new", "delete", "run")
        )
        self._handle = new(ctypes.byref(model), self.threads)
        weakref.finalize(self, delete, self._handle).atexit = False

    def run(
        self,
        position_B1: Tensor,
        first_B: Tensor,
        *,
        slot: int,
        token_B1: Tensor | None = None,
        x_BH: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        logits_BV: Tensor | None = None,
    ) -> None:
        """From tokens, or from what enters the first of the layers, which x_BH holds, and what leaves the last
        afterwards. first_B: the first slot that each row sees; its token is written as many slots behind that as its
        position says. slot: the last of these."""
        first, last = layers or (0, self.model.layer_count)
        if not 0 <= first <= last <= self.model.layer_count:
            raise bad_value(
                "layers", f"up to {self.model.layer_count}", layers, "make a Stepper of the model as it is now"
            )
        call = self.call(position_B1, first_B, token_B1=token_B1, x_BH=x_BH, logits_BV=logits_BV)
        call.first_layer, call.last_layer = first, last
        self.run_call(call, slot)

    def call(
        self,
        position_B1: Tensor,
        first_B: Tensor,
        *,
        token_B1: Tensor | None = None,
        x_BH: Tensor | None = None,
        logits_BV: Tensor | None = None,
        chosen_B1: Tensor | None = None,
    ) -> CStepCall:
        """All layers, for `run_call`, which may be given it again; it holds addresses, so the tensors have to live as
        long. chosen_B1: gets the first of each row's largest logits, and may be token_B1."""
        if (token_B1 is None) == (x_BH is None):
            raise bad_value("token_B1", "tokens, or x_BH", "both or neither", "pass one of them")
        rows, vocabulary = self.model.rows, self.model.vocabulary
        return CStepCall(
            optional_address("token_B1", token_B1, torch.int64, (rows, 1)),
            address("position_B1", position_B1, torch.int64, (rows, 1)),
            address("first_B", first_B, torch.int64, (rows,)),
            0, self.model.layer_count, 0,
            optional_address("x_BH", x_BH, torch.float32, (rows, self.model.hidden)),
            optional_address("logits_BV", logits_BV, torch.float32, (rows, vocabulary)),
            optional_address("chosen_B1", chosen_B1, torch.int64, (rows, 1)),
        )  # fmt: skip

    def run_call(self, call: CStepCall, slot: int) -> None:
        if not 0 <= slot < self.model.length:
            raise bad_value("slot", f"below {self.model.length}", slot, "make a Decoder with a longer cache")
        if not self._streamed:
            self._run(call)
            return
        with ExitStack() as stack:
            for layer, _ in self._streamed.values():
                stack.enter_context(layer.alone())
            self._run_streamed(call)

    def _run(self, call: CStepCall) -> int:
        """The layer before whose experts it ended, or the last one's end."""
        return self._run_in_core(self._handle, ctypes.byref(call))

    def _run_streamed(self, call: CStepCall) -> None:
        call = CStepCall.from_buffer_copy(call)
        last, logits, rows = call.last_layer, call.logits, self.model.rows
        while True:
            call.resumes, call.last_layer, call.logits = 0, last, logits
            stopped = self._run(call)
            for index in range(call.first_layer, stopped):
                if index in self._streamed:
                    layer, chosen = self._streamed[index]
                    layer.note_use(chosen.tolist(), rows)
            if stopped == last:
                return
            layer, chosen = self._streamed[stopped]
            call.tokens, call.logits, call.resumes = None, None, 1
            call.first_layer, call.last_layer = stopped, stopped + 1
            with closing(layer.acquire(chosen.tolist(), rows)) as groups:
                for slot_of in groups:
                    layer.slot_of_E.fill_(-1)
                    for expert, place in slot_of.items():
                        layer.slot_of_E[expert] = place
                    self._run(call)
            call.first_layer = stopped + 1
