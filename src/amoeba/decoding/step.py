"""One forward of fixed shape that chooses the next token of each row, run as it is or captured in a CUDA graph.

B rows · C tokens of a row at once · L slots of the cache

    rows = Rows(model, cache, batch, device)      # where the rows stand: their last token, its position
    step = Step(model, rows, choose, tokens=1)    # reads rows.token_B1, writes choose(logits_BV) there
    step.prepare(capture=True)                    # compiles and captures; changes the rows
    step()

With more than one token it reads prompts from the first slot on: `ids_BC`, `position_BC`, and in `last` where they end;
what comes after that is computed too, and overwritten by the next tokens before anything looks at it. Where all
attention layers are recognised (`fused_layers`) it needs no mask: a prompt is a document, and so is its padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from amoeba.core import torch_internals
from amoeba.core.errors import bad_value
from amoeba.core.graph_replays import Replays, replays_of
from amoeba.decoding.cache import FixedCache
from amoeba.decoding.cache_attention import NAME, decoding_attention
from amoeba.decoding.compiled_layers import compiled_layers
from amoeba.decoding.fused_layers import fused_layers, join_projections
from amoeba.decoding.rotations import Rotations
from amoeba.integrations import fused_attention
from amoeba.integrations.exact_mode import NAME as EXACT
from amoeba.integrations.exact_mode import attention_configs
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.fused_routers import fused_routers
from amoeba.replay import live_tokens

Choose = Callable[[Tensor], Tensor]  # the next token of each row from its logits, on the device
_PROMPT = 16  # longer than any convolution's state


class Rows:
    """live_BL: which slots hold something to attend to; slots to come count, the mask of a step is causal. None: all.
    graph_memory: of all steps of these rows, which never run at once and keep nothing there."""

    def __init__(self, model: Any, cache: FixedCache, batch: int, device: torch.device) -> None:
        self.cache = cache
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.live_BL: Any = torch.ones(batch, cache.length, dtype=torch.bool, device=device)
        self.rotations = Rotations(model)
        self.graph_memory: Any = None


class Step:
    def __init__(self, model: Any, rows: Rows, choose: Choose, *, tokens: int = 1, compiled: bool = False) -> None:
        self.model, self.rows, self.choose, self.compiled = model, rows, choose, compiled
        self.tokens = tokens
        batch, device = rows.token_B1.shape[0], rows.token_B1.device
        if tokens > 1:
            self.ids_BC = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
            self.position_BC = torch.zeros_like(self.ids_BC)
            self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_exact = False
        self._configs = attention_configs(model)
        self._by_documents = False
        self._replays, self._passes = replays_in(model), None
        self._takes_cache_position = "cache_position" in inspect.signature(type(model).forward).parameters

    def prepare(self, capture: bool) -> None:
        """Runs it, and captures it where that is asked for. What the rows hold afterwards means nothing."""
        if not capture:
            return
        if self.compiled and self._is_exact:
            raise bad_value("compiled", "False in exact mode", True, "leave it out")
        join_projections(self.model)
        self._begin_states()
        if self.compiled and not all(layer.is_initialized for layer in self.rows.cache.layers):
            with ExitStack() as stack:  # as it is: a compiled layer writes into keys and values that are there
                self._enter(stack, compiled=False)
                self._run()
        with ExitStack() as stack:
            self._enter(stack, self.compiled, fused=True)
            ready = torch.cuda.Stream()
            ready.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(ready), nullcontext() if self._replays is None else self._replays.rehearsing():
                self._run()
            torch.cuda.current_stream().wait_stream(ready)
            self.rows.cache.slot.zero_()
            graph = torch.cuda.CUDAGraph()
            if self._replays is not None:
                self._passes = stack.enter_context(self._replays.capturing())
            memory = self.rows.graph_memory
            with torch_internals.capture(graph, pool=memory, stream=ready):
                self._run()
        self._graph, self.rows.graph_memory = graph, memory or graph.pool()
        self._captured_exact = self._is_exact

    @torch.no_grad()
    def _begin_states(self) -> None:
        """A step goes on from states that are there; without them layers run other code, for a prompt."""
        cache, batch = self.rows.cache, self.rows.token_B1.shape[0]
        cache.begin()
        if cache.states:
            cache.filled = 0
            position = torch.arange(_PROMPT, dtype=torch.int64, device=cache.slot.device).expand(batch, -1)
            ids = torch.zeros_like(position)
            self.model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def rehearse(self) -> None:
        """Runs it as `prepare` does before it captures."""
        join_projections(self.model)
        self._begin_states()
        with ExitStack() as stack:
            self._enter(stack, compiled=False, fused=True)
            self._run()

    def __call__(self) -> None:
        if self._graph is not None:
            if self._captured_exact != self._is_exact:
                expected, got = ("exact mode on", "off") if self._captured_exact else ("exact mode off", "on")
                raise bad_value("Decoder", f"{expected}, as when its steps were captured", got, "make a new Decoder")
            if self._replays is None:
                self._graph.replay()
            else:
                self._replays.replay(self._passes, self._graph.replay)
            return
        with ExitStack() as stack:
            self._enter(stack, self.compiled)
            self._run()

    def check(self) -> None:
        """Behind a wait for a call of it, before what it made is used."""
        if self._replays is not None:
            self._replays.check()

    @property
    def _is_exact(self) -> bool:
        return any(config._attn_implementation_internal == EXACT for config in self._configs)

    def _enter(self, stack: ExitStack, compiled: bool, fused: bool = False) -> None:
        """fused: by our kernels, for which a model is looked through; compiled layers need our routers alone."""
        self.rows.cache.filled = None if self.tokens == 1 else 0
        stack.enter_context(torch.no_grad())
        stack.enter_context(self.rows.rotations.fixed())
        self._by_documents = False
        if fused and not self._is_exact:
            stack.enter_context(fused_routers(self.model))
            if not compiled:
                all_attention = stack.enter_context(fused_layers(self.model))
                self._by_documents = all_attention and self.tokens > 1
        name = fused_attention.NAME if self._by_documents else NAME
        stack.enter_context(decoding_attention(self._configs, name))
        if compiled:
            stack.enter_context(compiled_layers(self.model, self.rows.cache))

    def _run(self) -> None:
        rows, slot = self.rows, self.rows.cache.slot
        if self.tokens == 1:
            token_B = self.choose(self._logits(rows.token_B1, rows.position_B1, 1))
            rows.position_B1.add_(1)
            slot.add_(1)
        else:
            token_B = self.choose(self._logits(self.ids_BC, self.position_BC, self.last))
            rows.position_B1.copy_(self.position_BC.index_select(1, self.last) + 1)
            slot.add_(self.last + 1)
        rows.token_B1.copy_(token_B[:, None])

    def _logits(self, ids: Tensor, position: Tensor, keep: int | Tensor) -> Tensor:
        more: dict[str, Any] = {}
        if self._takes_cache_position:
            more["cache_position"] = self.rows.cache.slot[:1] + torch.arange(
                self.tokens, dtype=torch.int64, device=ids.device
            )
        live_BL = self.rows.live_BL
        if live_BL is not None and self.tokens > 1:
            live_BL = live_BL[:, : self.tokens]
        if self._by_documents:
            assert live_BL is not None
            ends = _documents(live_BL)
            more |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
            more |= dict.fromkeys(("max_length_q", "max_length_k"), self.tokens)
        with live_tokens(live_BL if self._by_documents else None):
            out = self.model(
                input_ids=ids,
                position_ids=position,
                attention_mask=None if self._by_documents else live_BL,
                past_key_values=self.rows.cache,
                use_cache=True,
                logits_to_keep=keep,
                **more,
            )
        if isinstance(keep, Tensor) and out.logits.shape[1] == self.tokens:  # some models do not know `logits_to_keep`
            return out.logits.index_select(1, keep)[:, 0]
        return out.logits[:, -1]


def _documents(live_BC: Tensor) -> Tensor:
    """Ends of each row's padding and of its prompt, as flash attention is told them."""
    rows, tokens = live_BC.shape
    end_B = torch.arange(1, rows + 1, dtype=torch.int32, device=live_BC.device) * tokens
    pads_B = end_B - live_BC.sum(1, dtype=torch.int32)
    return torch.cat((end_B.new_zeros(1), torch.stack((pads_B, end_B), 1).flatten()))


def replays_in(model: Any) -> Replays | None:
    """Of experts that come while a step is replayed; two kinds of them `why_not` refuses."""
    found = replays_of(placed_in(module) for module in experts_modules(model).values())
    return found[0] if found else None
