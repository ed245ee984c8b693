"""Routing replay: records which experts a model chose, and has later passes over the same text use them again.

    from amoeba import replay

    with replay.recording(model, rows=4, length=700) as recorder:
        ...generate...                                      # with `Decoder`, model.generate, or a loop of your own
    records = recorder.take(texts)                          # one RoutingRecord per text: prompt and new tokens

    with replay.replaying(model, records, input_ids, attention_mask):
        model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss.backward()

Only the ids are replayed. Each router weighs them from its live logits, as it weighs its own choice, so gradients reach
the router and, where the ids are those it would choose, so are all numbers. It serves the routers of `amoeba.MoE` and
those of transformers that choose by torch.topk, wherever the experts are.

Recording neither waits for the device nor decides anything on the host, so a captured step records as well. A record
that does not fit its text or its model raises ValueError, at the latest at the end of `replaying`.

T tokens of a pass · B rows · S slots of a row · N tokens of a text · L MoE layers · K experts per token · E experts
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value, counted
from amoeba.core.torch_internals import inside_backward
from amoeba.integrations.experts_module import is_experts
from amoeba.integrations.text_model import text_config
from amoeba.layer import Router
from amoeba.routing.forced_choice import ForcedChoice

STATE = "_amoeba_replay"  # what a module that takes part knows of it
UNKNOWN = -1 << 40  # the token of a model that is called with hidden states


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """The experts of each token of a text.

    tokens_N:   the ids of the text: prompt and completion.
    expert_NLK: the experts of each token in each MoE layer, the layout of vLLM's `routed_experts`. A row of -1 has no
                record, and is routed live. One row less than tokens: the last token was sampled and never read.
    model:      what it was recorded from; None: unknown, as with an imported one.

    Both may be given as anything that torch.as_tensor takes. record[:n] is the record of a text that was cut.
    """

    tokens_N: Tensor
    expert_NLK: Tensor
    model: str | None = None

    def __post_init__(self) -> None:
        given = self.tokens_N, self.expert_NLK
        tokens_N, expert_NLK = (torch.as_tensor(each, dtype=None, device="cpu") for each in given)
        if tokens_N.dim() != 1 or _is_no_id(tokens_N):
            raise bad_value("tokens_N", "the token ids of one text", _shown(tokens_N), "pass one record for each text")
        if expert_NLK.dim() != 3 or _is_no_id(expert_NLK):
            raise bad_value(
                "expert_NLK",
                "expert ids of shape (tokens, layers, experts per token)",
                _shown(expert_NLK),
                "pass routed_experts as vLLM returns it",
            )
        tokens, rows = len(tokens_N), len(expert_NLK)
        if rows not in (tokens, tokens - 1):
            raise bad_value(
                "expert_NLK",
                f"a row for each of the {tokens} tokens, or for all but the last",
                counted(rows, "row"),
                "pass prompt and completion in both, or neither; rows of -1 stand for tokens without a record",
            )
        if rows < tokens:
            expert_NLK = torch.cat((expert_NLK, expert_NLK.new_full((1, *expert_NLK.shape[1:]), -1)))
        object.__setattr__(self, "tokens_N", tokens_N.long())
        object.__setattr__(self, "expert_NLK", expert_NLK.int())

    def __len__(self) -> int:
        return len(self.tokens_N)

    def __getitem__(self, part: slice) -> RoutingRecord:
        return RoutingRecord(self.tokens_N[part], self.expert_NLK[part], self.model)


def read_trace(path: str | Path, tokens: Sequence[int]) -> RoutingRecord:
    """From the file of `amoeba generate --record`, of a run with one prompt. tokens: prompt and completion."""
    from amoeba.stream.cache import trace

    found = trace.read_trace(path)

    def of_layer(each: Any, layer: int) -> Tensor:
        return torch.tensor(each.of_layer(layer), dtype=torch.int32, device="cpu").view(each.tokens, -1)

    layers = range(len(found.layers))
    expert_NLK = torch.cat([torch.stack([of_layer(each, layer) for layer in layers], 1) for each in found.passes])
    return RoutingRecord(tokens, expert_NLK.masked_fill(expert_NLK == trace.NO_EXPERT, -1))  # type: ignore[arg-type]


_recorders: weakref.WeakKeyDictionary[nn.Module, dict[Any, Recorder]] = weakref.WeakKeyDictionary()


@contextmanager
def recording(model: nn.Module, *, rows: int, length: int) -> Iterator[Recorder]:
    """Records what the routers choose inside. rows: of each batch; length: slots of a row, with padding and new tokens.

    A step that is captured inside, as a Decoder does when it first generates, records whenever it is replayed. Its
    memory, 2·L·K bytes for each slot, therefore stays with the model and serves the next `recording` of these sizes.
    What was recorded before is forgotten at the start, and overwritten by each generation.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    key = rows, length, device, *(id(layer.chosen) for layer in _layers(model))
    recorder = _recorders.setdefault(model, {}).setdefault(key, Recorder(model, rows, length))
    recorder.forget()
    with _attached(model, recorder, [_Recorded(recorder, layer) for layer in recorder.layers]):
        yield recorder


class _Observer:
    """What records or replays the passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.layers, self.description = _layers(model), _description(model)
        self.dtype = torch.int16 if max(layer.experts for layer in self.layers) < 2**15 else torch.int32
        self.is_inside = False  # a pass of the model

    def before(self, tokens: _Pass) -> None:
        """A pass, on the host or while it is captured."""

    def after(self) -> None:
        """A pass that came to its end."""

    def recomputed(self) -> None:
        """A layer runs again in backward."""

    def seen(self) -> None:
        """A layer runs."""
        if torch.compiler.is_compiling():
            return
        if inside_backward():
            self.recomputed()
        elif not self.is_inside:
            remedy = "record or replay what you call"
            raise bad_value("model", "calls of the module that is recorded or replayed", "a call of a part", remedy)


class Recorder(_Observer):
    """Made by `recording`."""

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        super().__init__(model)
        self.rows, self.length = rows, length
        self.expert_LSK: Tensor | None = None
        self.slot_T = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the tokens of this pass, in S below
        # S: of each row `length` slots, and one for all that is beyond
        self._token_S = self._live_S = self._end = self._next_end = self.slot_T

    def take(self, texts: Sequence[Sequence[int]]) -> list[RoutingRecord]:
        """The records of the last generation. texts: of each row the prompt and as many of its new tokens as you keep.

        This waits for the device. ValueError where a text is not what was read.
        """
        end = 0 if self.expert_LSK is None else min(int(self._end), self.length)
        if self.expert_LSK is None or end == 0:
            remedy = "generate inside, and make captured steps inside too: a Decoder that was prepared before has none"
            raise bad_value("take", "a whole pass of the model inside `recording`", "none", remedy)
        if len(texts) != self.rows:
            raise bad_value("texts", f"{self.rows}, one for each row", len(texts), "pass them in the order of the rows")
        by_row = [each.view(self.rows, self.length + 1)[:, :end].cpu() for each in (self._token_S, self._live_S)]
        expert_LBSK = self.expert_LSK.unflatten(1, (self.rows, self.length + 1))[:, :, :end]
        records = []
        for row, (text, token_S, live_S) in enumerate(zip(texts, *by_row, strict=True)):
            live_S = live_S.bool()
            read, text_N = token_S[live_S][: len(text)], torch.as_tensor(text, dtype=torch.int64, device="cpu")
            if len(read) < len(text) - 1:
                raise bad_value(
                    f"texts[{row}]",
                    f"at most {len(read) + 1} tokens: those that were recorded, and one sampled after them",
                    len(text),
                    f"raise length ({self.length}) to that of the longest row with its padding, or pass what was read",
                )
            _check_text(f"texts[{row}]", read, text_N[: len(read)])
            expert_NLK = expert_LBSK[:, row].transpose(0, 1).cpu()[live_S][: len(text)]
            records.append(RoutingRecord(text_N, expert_NLK, self.description))
        return records

    def forget(self) -> None:
        """What was recorded so far."""
        self._end.zero_()
        self._live_S.zero_()

    def before(self, tokens: _Pass) -> None:
        rows, device = tokens.rows, tokens.device
        if rows != self.rows:
            raise bad_value("rows", f"passes of {self.rows} rows", rows, f"record with rows={rows}")
        seen = tokens.start + tokens.length if isinstance(tokens.start, int) else 1
        if tokens.mask is not None and (getattr(tokens.mask, "ndim", 0) != 2 or tokens.mask.shape[1] < seen):
            expected = "two dimensions, (B, S), with the tokens in the cache"
            raise bad_value("attention_mask", expected, _shown(tokens.mask), "pass 1 for tokens, 0 for padding")
        if self.expert_LSK is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise bad_value(
                    "recording", "a first pass that is not captured", "a captured one", "run it once before"
                )
            self._token_S = torch.zeros(rows * (self.length + 1), dtype=torch.int64, device=device)
            self._live_S = torch.zeros_like(self._token_S)
            self._end = torch.zeros(1, dtype=torch.int64, device=device)
        slot_C = tokens.start + torch.arange(tokens.length, dtype=torch.int64, device=device)
        self._end.copy_(slot_C[:1])  # until the pass has come to its end
        self._next_end = slot_C[-1:] + 1
        row_B = torch.arange(rows, dtype=torch.int64, device=device) * (self.length + 1)
        self.slot_T = (row_B[:, None] + slot_C.clamp(max=self.length)).flatten()
        unknown = torch.full((rows, tokens.length), UNKNOWN, dtype=torch.int64, device=device)
        live = torch.ones_like(unknown) if tokens.mask is None else tokens.mask.index_select(1, slot_C).long()
        self._token_S.index_copy_(0, self.slot_T, (unknown if tokens.ids is None else tokens.ids).flatten())
        self._live_S.index_copy_(0, self.slot_T, live.flatten())

    def after(self) -> None:
        self._end.copy_(self._next_end)


@torch.library.custom_op("amoeba::record_choice", mutates_args=("expert_SK",))
def _record_choice(expert_TK: Tensor, slot_T: Tensor, expert_SK: Tensor) -> None:
    """An operator of its own so that the question below is asked at run time, also in compiled graphs."""
    if not inside_backward():  # activation checkpointing runs the forward a second time
        expert_SK.index_copy_(0, slot_T, expert_TK.to(expert_SK.dtype))


@contextmanager
def replaying(
    model: nn.Module,
    records: Sequence[RoutingRecord | Sequence[RoutingRecord]],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> Iterator[Replay]:
    """Passes over this batch inside use the recorded experts. Call the model, and backward, inside.

    records: of each row of input_ids (B, S): one, or several where the row packs several documents.
    attention_mask: (B, S), 0 for padding, which is routed live.

    ValueError at once for records that do not fit the batch or the model; at the end, where this waits for the device,
    if a pass read other tokens or a router did not follow.
    """
    replay = Replay(model, records, input_ids, attention_mask)
    with _attached(model, replay, replay.states):
        yield replay
        replay.check()


class Replay(_Observer):
    """Made by `replaying`. The ids stay at their addresses while `load` brings those of other batches of this shape."""

    def __init__(
        self, model: nn.Module, records: Sequence[Any], input_ids: Tensor, attention_mask: Tensor | None
    ) -> None:
        super().__init__(model)
        self._model = model
        self._all_layers, self._among_all = _numbers(model, self.layers)
        self._unfinished = 0  # passes whose layers will run again in a backward that has not come yet
        token_BS, live_BS, expert_LTK = self._aligned(records, input_ids, attention_mask)
        device = next((p.device for layer in self.layers for p in layer.block.parameters()), input_ids.device)
        self._loaded = [each.to(device, copy=True) for each in (token_BS, live_BS, expert_LTK)]  # ours to overwrite
        # of each layer whether its experts got other ids; and behind the last one whether a pass read another text
        self._wrong = torch.zeros(len(self.layers) + 1, dtype=torch.bool, device=device)
        each = zip(self.layers, self._loaded[2], self._wrong[:-1], strict=True)
        self.states = [_Replayed(self, *of_layer) for of_layer in each]

    def load(self, records: Sequence[Any], input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """The records of another batch of the same shape, after the backward of the one before."""
        self.check()
        new = self._aligned(records, input_ids, attention_mask)
        shapes = [(*tokens.shape, experts.shape[2]) for tokens, _, experts in (self._loaded, new)]
        if shapes[0] != shapes[1]:
            raise bad_value("input_ids", f"rows, tokens and K as before, {shapes[0]}", shapes[1], "replay it by itself")
        for mine, other in zip(self._loaded, new, strict=True):
            mine.copy_(other)

    def check(self) -> None:
        """Waits for the device. ValueError if what was computed since the last check is not a replay."""
        if self._unfinished:
            self._unfinished = 0
            raise bad_value(
                "replaying",
                "backward inside: with gradient checkpointing it runs the layers again, with the same experts",
                "the end before it",
                "call backward before `replaying` or `load` ends the batch",
            )
        wrong = self._wrong.tolist()
        self._wrong.zero_()
        if wrong.pop():
            raise bad_value(
                "input_ids", "in each pass the tokens that were loaded", "others", "load the records of this batch"
            )
        names = [layer.name for layer, is_wrong in zip(self.layers, wrong, strict=True) if is_wrong]
        if names:
            raise bad_value(
                "replay",
                "experts that the router can choose, and a router that follows",
                f"others, or too many groups of them, in {', '.join(names[:3])}{' and others' if names[3:] else ''}",
                "discard this step; replay records of this model, and report routers that do not choose by torch.topk",
            )

    def before(self, tokens: _Pass) -> None:
        token_BS, live_BS, _ = self._loaded
        shape = (tokens.rows, tokens.length)
        if shape != token_BS.shape:
            raise bad_value(
                "input_ids",
                f"the whole batch that was loaded, shape {tuple(token_BS.shape)}",
                f"shape {shape}",
                "call the model once for all of it, without a cache, or replay this batch by itself",
            )
        if tokens.ids is not None:
            self._wrong[-1:].logical_or_(((tokens.ids != token_BS) & live_BS).any())
        if torch.is_grad_enabled() and any(
            getattr(module, "gradient_checkpointing", False) and module.training for module in self._model.modules()
        ):
            self._unfinished += 1

    def recomputed(self) -> None:
        self._unfinished = 0

    def _aligned(
        self, records: Sequence[Any], input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """token_BS, live_BS and expert_LTK, -1 for padding; on the host."""
        if input_ids.dim() != 2 or len(records) != len(input_ids):
            expected = f"{len(records)} rows of tokens, one for each of the records"
            raise bad_value("input_ids", expected, _shown(input_ids), "pass a list of records for packed documents")
        token_BS = input_ids.cpu().long()
        live_BS = torch.ones_like(token_BS, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                expected = f"the shape of input_ids, {tuple(input_ids.shape)}"
                raise bad_value("attention_mask", expected, _shown(attention_mask), "pass 1 for tokens, 0 for padding")
            live_BS = attention_mask.cpu() != 0
        texts: list[list[RoutingRecord]] = [[r] if isinstance(r, RoutingRecord) else list(r) for r in records]
        widths = {each.expert_NLK.shape[2] for text in texts for each in text}
        if len(widths) != 1:
            got = f"{sorted(widths)}" if widths else "no record"
            raise bad_value("records", "one number of experts per token", got, "replay records of one model")
        expert_BSLK = torch.full((*token_BS.shape, len(self.layers), *widths), -1, dtype=self.dtype, device="cpu")
        for row, text in enumerate(texts):
            name = f"records[{row}]"
            fitting = [self._fitting(f"{name}[{place}]" if text[1:] else name, each) for place, each in enumerate(text)]
            tokens_N = torch.cat([each.tokens_N for each in text] or [token_BS.new_empty(0)])
            read_N = token_BS[row][live_BS[row]]
            if len(tokens_N) != len(read_N):
                kept = "" if attention_mask is None else " that the attention mask keeps"
                raise bad_value(
                    name,
                    f"the {len(read_N)} tokens of this row{kept}",
                    len(tokens_N),
                    "cut a record as its text, record[:n], or pass the attention mask",
                )
            _check_text(name, read_N, tokens_N)
            if fitting:
                expert_BSLK[row, live_BS[row]] = torch.cat(fitting).to(self.dtype)
        return token_BS, live_BS, expert_BSLK.flatten(0, 1).transpose(0, 1).contiguous()

    def _fitting(self, name: str, record: RoutingRecord) -> Tensor:
        """expert_NLK of our MoE layers; ValueError where these cannot be its experts."""
        if record.model not in (None, self.description):
            raise bad_value(name, f"a record of {self.description}", record.model, "replay records of this model")
        expert_NLK = record.expert_NLK
        if expert_NLK.shape[1] == self._all_layers:
            expert_NLK = expert_NLK[:, self._among_all]  # vLLM may count layers without experts too
        if expert_NLK.shape[1] != len(self.layers):
            layers = counted(len(self.layers), "MoE layer")
            raise bad_value(name, layers, expert_NLK.shape[1], "replay records of this model")
        most_L1 = torch.tensor([layer.experts for layer in self.layers], dtype=torch.int32, device="cpu")[:, None]
        ordered = expert_NLK.sort(dim=2).values
        is_none = (expert_NLK < 0).all(dim=2)
        for fault, bad_NL in {
            "ids from 0 to below the number of experts": ((expert_NLK < -1) | (expert_NLK >= most_L1)).any(2),
            "experts in all slots of a token, or -1 in all of them": (expert_NLK < 0).any(2) & ~is_none,
            "each expert of a token once": (ordered[..., 1:] == ordered[..., :-1]).any(2) & ~is_none,
        }.items():
            if bad_NL.any():
                token, layer = bad_NL.nonzero()[0].tolist()
                got = f"{expert_NLK[token, layer].tolist()} at token {token} in {self.layers[layer].name}"
                raise bad_value(name, f"{fault} ({self.layers[layer].experts})", got, "record this text again")
        return expert_NLK


# --- how a model takes part


class _Layer(NamedTuple):
    name: str
    block: Any  # in which the choice is made
    chosen: Any  # which is called with it, or returns it
    experts: int


def _layers(model: nn.Module) -> list[_Layer]:
    found, parents = [], {child: parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():
        if isinstance(module, Router):
            found.append(_Layer(name, module, module, module.config.num_experts))
        elif is_experts(module) and hasattr(module, "num_experts") and module in parents:
            block = parents[module]
            while hasattr(block, "base_layer"):  # PEFT's, around the experts
                block = parents[block]
            found.append(_Layer(name, block, module, int(module.num_experts)))
    if not found:
        raise bad_value(
            "model", "MoE layers of amoeba.MoE or of transformers", type(model).__name__, "pass a model with experts"
        )
    return found


def _config(model: nn.Module) -> Any:
    """Of the text part, also where something is wrapped around the model; None without transformers."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((text_config(config) for config in configs if hasattr(config, "model_type")), None)


def _description(model: nn.Module) -> str:
    kind, sizes = getattr(_config(model), "model_type", "amoeba.MoE"), [layer.experts for layer in _layers(model)]
    return f"{kind}, {counted(len(sizes), 'MoE layer')} of {'/'.join(map(str, sorted(set(sizes))))} experts"


def _numbers(model: nn.Module, layers: Sequence[_Layer]) -> tuple[int, list[int]]:
    """How many decoder layers the model has, with and without experts, and which have them; 0 where that is unknown."""
    total = getattr(_config(model), "num_hidden_layers", 0)
    found = [int(each[1]) for layer in layers if (each := re.search(r"\.(\d+)\.", f".{layer.name}."))]
    return (total, found) if len(found) == len(layers) and max(found) < total else (0, [])


_live: ContextVar[Tensor | None] = ContextVar("live", default=None)


@contextmanager
def live_tokens(live_BS: Tensor | None) -> Iterator[None]:
    """Which tokens of the passes inside are text, where padding is a document of its own and the model gets no mask."""
    before = _live.set(live_BS)
    try:
        yield
    finally:
        _live.reset(before)


class _Pass(NamedTuple):
    """What is said of a call of the model before any layer runs."""

    rows: int
    length: int  # tokens of each row
    start: int | Tensor  # the slot of the first
    ids: Tensor | None
    mask: Any
    device: torch.device


def _pass_of(args: tuple, kwargs: dict[str, Any]) -> _Pass:
    given = next((each for each in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None), None)
    given = args[0] if given is None and args else given
    if not isinstance(given, Tensor) or given.dim() < 2:
        raise bad_value("input_ids", "token ids (B, S) or hidden states (B, S, H)", _shown(given), "add a first axis")
    cache, (rows, length) = kwargs.get("past_key_values"), given.shape[:2]
    start, ids = 0 if cache is None else cache.get_seq_length(), None if given.is_floating_point() else given
    mask = kwargs.get("attention_mask")
    return _Pass(rows, length, start, ids, _live.get() if mask is None else mask, given.device)


class _Recorded:
    """Of a layer that is recorded."""

    def __init__(self, recorder: Recorder, layer: _Layer) -> None:
        self.recorder, self.layer = recorder, layer
        self.expert_SK: Tensor | None = None

    def force(self) -> None:
        self.recorder.seen()

    def note(self, expert_TK: Tensor) -> None:
        if not torch.compiler.is_compiling() and inside_backward():
            return
        recorder, (tokens, top_k) = self.recorder, expert_TK.shape
        if recorder.expert_LSK is None:
            shape = (len(recorder.layers), len(recorder._token_S), top_k)
            recorder.expert_LSK = torch.full(shape, -1, dtype=recorder.dtype, device=expert_TK.device)
        if self.expert_SK is None:
            self.expert_SK = recorder.expert_LSK[recorder.layers.index(self.layer)]
        expected = (len(recorder.slot_T), self.expert_SK.shape[1])
        if (tokens, top_k) != expected:
            name, remedy = f"recording {self.layer.name}", "such a model cannot be recorded"
            raise bad_value(name, f"tokens and experts per token {expected}", (tokens, top_k), remedy)
        _record_choice(expert_TK, recorder.slot_T, self.expert_SK)


class _Replayed:
    """Of a layer that is replayed."""

    def __init__(self, replay: Replay, layer: _Layer, expert_TK: Tensor, wrong: Tensor) -> None:
        self.replay, self.layer, self.expert_TK, self.wrong = replay, layer, expert_TK, wrong

    def force(self) -> ForcedChoice:
        self.replay.seen()
        return ForcedChoice(self.expert_TK, self.layer.experts, self.wrong)

    def note(self, expert_TK: Tensor) -> None:
        if expert_TK.shape != self.expert_TK.shape:
            name, (tokens, top_k) = f"replay of {self.layer.name}", expert_TK.shape
            expected = f"records of {top_k} experts per token for {tokens} tokens"
            raise bad_value(name, expected, _shown(self.expert_TK), "replay records of this model")
        self.wrong.logical_or_(((self.expert_TK >= 0) & (expert_TK != self.expert_TK)).any())


class _Block:
    """Mixed in before the class of a block that chooses experts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__[STATE]
        forced = state.force()
        if forced is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with forced:
            found = super().forward(*args, **kwargs)  # type: ignore[misc]
        if forced.choices == 0:
            raise bad_value(
                f"replay of {state.layer.name}",
                f"a choice of {state.expert_TK.shape[1]} among {state.layer.experts} experts by torch.topk",
                "another number of them, or another way to choose",
                "replay records of this model; routers that choose otherwise cannot be replayed",
            )
        return found


class _Experts:
    """Mixed in before the class of an experts module of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
        self.__dict__[STATE].note(top_k_index)
        return super().forward(hidden_states, top_k_index, top_k_weights, **kwargs)  # type: ignore[misc]


class _OwnRouter(_Block):
    """Mixed in before the class of a router of amoeba.MoE. What capacity then drops was chosen all the same."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routing = super().forward(*args, **kwargs)
        self.__dict__[STATE].note(routing.expert_TK if routing.chosen_TK is None else routing.chosen_TK)
        return routing


@functools.cache
def _mixed(mixin: Any, own: Any) -> Any:
    """One for all layers of a kind, so that what torch.compile makes of one serves the others."""
    return type(own.__name__, (mixin, own), {"__module__": own.__module__})


@contextmanager
def _attached(model: nn.Module, observer: _Observer, states: Sequence[_Recorded | _Replayed]) -> Iterator[None]:
    """While it lasts the layers' modules are of classes that ask their states, and each pass is announced."""

    def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        observer.before(_pass_of(args, kwargs))
        observer.is_inside = True

    def after(*_: Any) -> None:
        observer.is_inside = False
        observer.after()

    changed: list[tuple[Any, type]] = []
    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        for state in states:
            name, block, chosen, _ = state.layer
            for module, mixin in ((block, _OwnRouter),) if block is chosen else ((block, _Block), (chosen, _Experts)):
                if STATE in module.__dict__:
                    expected = "layers that are neither recorded nor replayed yet, each with one router"
                    raise bad_value("model", expected, name, "end the other `recording` or `replaying` first")
                own: Any = type(module)
                changed.append((module, own))
                module.__class__, module.__dict__[STATE] = _mixed(mixin, own), state
        yield
    finally:
        for module, own in reversed(changed):
            module.__class__ = own
            del module.__dict__[STATE]
        for hook in hooks:
            hook.remove()


def _is_no_id(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.bool


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _check_text(name: str, read_N: Tensor, given_N: Tensor) -> None:
    """ValueError where a text of the same length is another one."""
    other_N = (read_N != given_N) & (read_N != UNKNOWN)
    if other_N.any():
        at = int(other_N.nonzero()[0])
        expected = f"the text of this row, with token {int(read_N[at])} at {at}"
        raise bad_value(name, expected, f"token {int(given_N[at])}", "keep the rows in order")
