"""Texts that come and go as rows of one batch: each row is read by itself, and steps continue all of them.

B rows · N of them in a step · L slots of the cache · V vocabulary

    slots = make_slots(model, batch=8, length=4096)
    known = slots.begin(ids)              # of a prompt, what an earlier text has in common with it
    slots.read(ids, row, known, len(ids)) # in one or several pieces; its logits are then in slots.logits_BV[row]
    slots.step(count)                     # reads token_B1[:count], one token each, at each row's own position
    slots.move(source, target)            # a text goes on in another row

On a GPU steps are CUDA graphs for a few sizes, and prompts are read by the graphs of a `Decoder`. Nothing waits for the
device. Rows that hold no text compute what nobody reads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import StaticLayer

from amoeba.core.errors import one_line
from amoeba.core.torch_internals import copy_all
from amoeba.decoding.cache import FixedCache, FixedLayer
from amoeba.decoding.cpu_step import NativeModel
from amoeba.decoding.decoder import Decoder, cache_length, native_steps, why_no_slots, why_not
from amoeba.decoding.rotations import Rotations
from amoeba.decoding.step import Rows, Step
from amoeba.decoding.trial import is_promised
from amoeba.integrations.text_model import text_config

logger = logging.getLogger("amoeba")

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of captured steps: a third of the rows is idle at most
PROMPT_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # of captured prompts: few, since all are captured before the first
SHARED_PREFIX = 32  # tokens that are worth a copy from another row. On a GPU more: the rest is read without a graph.
SHARED_PREFIX_CAPTURED = 1024


def make_slots(
    model: Any, *, batch: int, length: int, capture: bool | None = None, dense: str = "auto"
) -> Slots | RowByRow:
    """length: tokens of a text at most, with its prompt. capture: None where the model is on a GPU and allows it.
    dense: as of `native_steps`."""
    reason = why_no_slots(model)
    if reason is not None:
        logger.info("rows are stepped one by one: %s", reason)
        return RowByRow(model, batch, length)
    return Slots(model, batch, length, model.device.type == "cuda" if capture is None else capture, dense)


class Slots:
    reads_in_pieces = True

    def __init__(self, model: Any, batch: int, length: int, capture: bool, dense: str) -> None:
        self.model, self.device, self.batch = model, model.device, batch
        reason = (
            why_not(model) or _why_wrong(model)
            if capture
            else f"CUDA graphs hold steps on an NVIDIA GPU, the model is on {self.device.type}"
        )
        if reason is None and not is_promised(model):
            reason = (
                f"transformers does not guarantee that a step of {type(model).__name__} needs no decision by the host"
            )
        self.captured = reason is None and self.device.type == "cuda"
        self._native: NativeModel | None = None
        if reason is not None and self.device.type == "cpu":
            found = native_steps(model, dense)
            reason, self._native = (found, None) if isinstance(found, str) else (reason, found)
        self.kind: Literal["captured", "native", "plain"] = "captured" if reason is None else "plain"
        self.reason = "steps are CUDA graphs" if reason is None else reason
        if self._native is not None:
            self.kind, self.reason = "native", "the C++ core computes all layers of a step in one call"
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._position_B1 = torch.zeros_like(self.token_B1)
        self._slot_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._held: list[list[int]] = [[] for _ in range(batch)]  # tokens whose keys a row has; [] if unknown
        self._last: list[int | None] = [None] * batch  # the last token of a row, which is not read yet
        self._prompt_logits: Tensor | None = None
        self.logits_BV: Tensor
        self._keys: list[Tensor]
        self._values: list[Tensor]
        keep = self._keep_prompt
        self._reader = Decoder(
            model, batch=1, length=length, capture=self.captured, choose=keep, prompt_sizes=PROMPT_SIZES
        )
        self.length = self._reader.cache.length
        self._reader.read_all([[0]])  # one token: the shapes of keys, values and logits are known after it
        assert self._prompt_logits is not None
        self.logits_BV = self._prompt_logits.new_zeros(batch, self._prompt_logits.shape[-1])
        layers: list[Any] = self._reader.cache.layers
        self._keys = [layer.keys.new_zeros(batch, *layer.keys.shape[1:]) for layer in layers]
        self._values = [layer.values.new_zeros(batch, *layer.values.shape[1:]) for layer in layers]
        self._steps: dict[int, Step] = {}
        self._memory: Any = None
        self._steppers: dict[int, Any] = {}
        if self.captured:
            for tokens in PROMPT_SIZES:
                if tokens <= self.length:
                    self._reader.prepare_prompt(tokens)
            for size in sorted({min(size, batch) for size in SIZES}, reverse=True):
                self._capture(size)

    def begin(self, ids: Sequence[int]) -> int:
        """How many tokens of this prompt are known, of a text that begins like it. `read` goes on from there."""
        count, row = self.known(ids)
        if count:
            for layer, keys, values in zip(self._reader.cache.layers, self._keys, self._values, strict=True):
                layer.keys[0, :, :count].copy_(keys[row, :, :count])
                layer.values[0, :, :count].copy_(values[row, :, :count])
        return count

    def read(self, ids: Sequence[int], row: int, known: int, end: int) -> None:
        """Of one prompt, the tokens from `known` to `end`; with the last one it is this row's."""
        self._reader.read_all([ids[:end]], known)
        if end == len(ids):
            assert self._prompt_logits is not None
            self._take(self._reader.cache, self._prompt_logits[0], 0, 0, row, ids)

    @torch.no_grad()
    def read_together(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """One pass for several prompts: each layer's experts are then read once for all of them."""
        tokens = max(map(len, prompts))
        pads = [tokens - len(ids) for ids in prompts]
        padded = [[ids[0]] * pad + list(ids) for ids, pad in zip(prompts, pads, strict=True)]
        ids_NL, pad_N = (torch.tensor(each, dtype=torch.int64, device=self.device) for each in (padded, pads))
        place_L = torch.arange(tokens, dtype=torch.int64, device=self.device)
        cache = DynamicCache()  # of all tokens, also in layers with a window
        out = self.model(
            input_ids=ids_NL,
            attention_mask=place_L[None] >= pad_N[:, None],
            position_ids=(place_L[None] - pad_N[:, None]).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for number, (row, ids, pad) in enumerate(zip(rows, prompts, pads, strict=True)):
            self._take(cache, out.logits[number, -1], number, pad, row, ids)

    def _take(self, cache: Any, logits_V: Tensor, place: int, pad: int, row: int, ids: Sequence[int]) -> None:
        """What was read in a row of this cache, behind its padding, becomes a row of ours."""
        self.logits_BV[row].copy_(logits_V)
        count, layers = len(ids), [*cache.layers]
        came = [layer.keys for layer in layers] + [layer.values for layer in layers]
        copy_all(
            [each[row, :, :count] for each in (*self._keys, *self._values)],
            [each[place, :, pad : pad + count] for each in came],
        )
        self._slot_B[row], self._position_B1[row] = count, count
        self._held[row], self._last[row] = list(ids), None

    def step(self, count: int, seen: int) -> int:
        """seen: tokens of the longest of these texts, with the one that is read now. Returns how many rows were run:
        the first `count`, or a few more."""
        if self._native is not None:
            self._step_natively(self._native, count, seen)
            return count
        size = next((size for size in sorted(self._steps) if size >= count), count)
        if size not in self._steps:
            self._steps[size] = self._new_step(size)
        step = self._steps[size]
        step.rows.cache.seen = self.length if step._graph is not None else min(seen, self.length)
        step()
        return size

    def _step_natively(self, native: NativeModel, count: int, seen: int) -> None:
        stepper = self._steppers.get(count)
        if stepper is None or stepper.threads != torch.get_num_threads():
            stepper = native.stepper([each[:count] for each in self._keys], [each[:count] for each in self._values])
            self._steppers[count] = stepper
        position_N1, token_N1 = self._position_B1[:count], self.token_B1[:count]
        logits_NV = torch.empty(count, native.vocabulary, dtype=torch.float32, device="cpu")
        first_N = torch.zeros(count, dtype=torch.int64, device="cpu")
        stepper.run(position_N1, first_N, slot=seen - 1, token_B1=token_N1, logits_BV=logits_NV)
        self.logits_BV[:count].copy_(logits_NV)
        position_N1.add_(1)
        self._slot_B[:count].add_(1)

    def check(self) -> None:
        """Behind a wait for a step, before what it made is used."""
        for step in itertools.islice(self._steps.values(), 1):
            step.check()

    def sizes(self, count: int) -> int:
        """Rows that a step of so many runs."""
        return next((size for size in sorted(self._steps) if size >= count), count) if self.captured else count

    def note(self, row: int, token: int) -> None:
        """The text of this row goes on with it: a later text that begins like this one need not be read."""
        if (before := self._last[row]) is not None:
            self._held[row].append(before)  # which was read to get this one
        self._last[row] = token

    def free(self, row: int) -> None:
        """What it holds may still be shared."""

    def move(self, source: int, target: int) -> None:
        count = min(len(self._held[source]) + 64, self.length)  # steps that are on their way have written more
        tables = (*self._keys, *self._values)
        to, of = ([each[row, :, :count] for each in tables] for row in (target, source))
        copy_all(to, of)
        for table in (self.token_B1, self._position_B1, self._slot_B, self.logits_BV):
            table[target].copy_(table[source])
        self._held[target], self._held[source] = self._held[source], []
        self._last[target], self._last[source] = self._last[source], None

    def known(self, ids: Sequence[int]) -> tuple[int, int]:
        """How many tokens of this prompt a row holds, and which; 0 where it is not worth a copy."""
        lengths = [
            _common(held[: self.length - 1], ids[:-1]) for held in self._held
        ]  # the last has to be read: its logits are asked for
        row = max(range(self.batch), key=lambda row: lengths[row])
        least = SHARED_PREFIX_CAPTURED if self.captured else SHARED_PREFIX
        return (lengths[row] if lengths[row] >= least else 0), row

    def _keep_prompt(self, logits_NV: Tensor) -> Tensor:
        if self._prompt_logits is None:
            self._prompt_logits = torch.zeros_like(logits_NV)
        self._prompt_logits.copy_(logits_NV)
        return logits_NV.new_zeros(1, dtype=torch.int64)

    def _new_step(self, size: int) -> Step:
        cache = SlotCache(self._keys, self._values, self._slot_B, size)
        rows = Rows.__new__(Rows)
        rows.cache, rows.live_BL, rows.graph_memory = cache, None, self._memory
        rows.rotations = Rotations(self.model)
        rows.token_B1, rows.position_B1 = self.token_B1[:size], self._position_B1[:size]

        def keep(logits_NV: Tensor) -> Tensor:
            self.logits_BV[:size].copy_(logits_NV)
            cache.slot.clamp_(max=self.length - 2)  # of rows without a text, which go on
            return rows.token_B1[:, 0]

        return Step(self.model, rows, keep)

    def _capture(self, size: int) -> None:
        step = self._new_step(size)
        try:
            step.prepare(capture=True)
        except Exception as error:  # CannotCapture, or of CUDA, of Triton, of the model's own code
            logger.warning("steps of %d rows are not captured: %s", size, one_line(error)[:300])
            step = self._new_step(size)
        self._steps[size], self._memory = step, step.rows.graph_memory
        for table in (self._slot_B, self._position_B1):
            table.zero_()


def _why_wrong(model: Any) -> str | None:
    """Of a model without a promise that its steps can be captured, after trying some."""
    if is_promised(model):
        return None
    try:
        Decoder(model, length=1).prepare(1)
    except Exception as error:  # CannotCapture, or whatever the model's code raises then
        return one_line(error)[:300]
    return None


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    pairs = zip(held, ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class SlotCache(FixedCache):
    """The first rows of keys and values (B, G, L, ·), each with a slot of its own. seen: slots that are looked at."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slot_B: Tensor, rows: int) -> None:
        self.length = self.seen = keys[0].shape[2]
        self.filled, self.states = None, []
        self.slot = slot_B[:rows]
        self.row = torch.arange(rows, dtype=torch.int64, device=slot_B.device)
        pairs = zip(keys, values, strict=True)
        Cache.__init__(self, layers=[SlotLayer(self, key[:rows], value[:rows]) for key, value in pairs])

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.slot


class SlotLayer(FixedLayer):
    cache: Any

    def __init__(self, cache: SlotCache, keys: Tensor, values: Tensor) -> None:
        StaticLayer.__init__(self, max_cache_len=cache.length)
        self.cache, self.slot = cache, cache.slot
        self.keys, self.values, self.is_initialized = keys, values, True

    def write_at_slot(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        row, seen = self.cache.row, self.cache.seen
        self.keys[row, :, self.slot] = key_states[:, :, 0]
        self.values[row, :, self.slot] = value_states[:, :, 0]
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.cache.seen, 0


class RowByRow:
    """As Slots, for models whose state between tokens cannot be rows of one cache: a step is one pass for each row."""

    kind: Literal["captured", "native", "plain"] = "plain"
    captured = reads_in_pieces = False

    def __init__(self, model: Any, batch: int, length: int) -> None:
        self.model, self.device, self.batch, self.length = model, model.device, batch, cache_length(length)
        self.reason = str(why_no_slots(model))
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        vocabulary = text_config(model.config).vocab_size
        self.logits_BV = torch.zeros(batch, vocabulary, dtype=torch.float32, device=self.device)
        self._caches: list[Any] = [None] * batch

    def read_together(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, ids in zip(rows, prompts, strict=True):
            self.read(ids, row, 0, len(ids))

    def begin(self, ids: Sequence[int]) -> int:
        return 0

    def read(self, ids: Sequence[int], row: int, known: int, end: int) -> None:
        self._caches[row] = DynamicCache(config=self.model.config)
        self._run(row, torch.tensor([list(ids)], dtype=torch.int64, device=self.device))

    def step(self, count: int, seen: int) -> int:
        for row in range(count):
            if self._caches[row] is not None:
                self._run(row, self.token_B1[row : row + 1])
        return count

    @torch.no_grad()
    def _run(self, row: int, ids: Tensor) -> None:
        out = self.model(input_ids=ids, past_key_values=self._caches[row], use_cache=True, logits_to_keep=1)
        self.logits_BV[row, : out.logits.shape[-1]].copy_(out.logits[0, -1])

    def check(self) -> None:
        """Nothing was captured."""

    def sizes(self, count: int) -> int:
        return count

    def note(self, row: int, token: int) -> None:
        """Nothing is shared."""

    def known(self, ids: Sequence[int]) -> tuple[int, int]:
        return 0, 0

    def free(self, row: int) -> None:
        self._caches[row] = None

    def move(self, source: int, target: int) -> None:
        self._caches[target], self._caches[source] = self._caches[source], None
        for table in (self.token_B1, self.logits_BV):
            table[target].copy_(table[source])
