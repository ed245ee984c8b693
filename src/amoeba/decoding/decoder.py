"""Prompts in, tokens out, one after another: a model with a cache of fixed addresses, whose steps are CUDA graphs, or
on a CPU one call of the C++ core each (`cpu_step`).

B rows · L slots of the cache

    decoder = Decoder(model, batch=1, length=700)
    decoder.prepare(prompt_tokens=17)                                      # compiles, captures
    for tokens in decoder.generate([ids], max_new_tokens=64, seed=1):     # one list of B tokens per step
        ...

Prompts of different lengths are padded on the left. A prompt is read by a captured graph, a very long one in pieces by
the model as it is. On a GPU the steps run ahead of what is handed out by `AHEAD`: the next token stays on the device
and is copied to the host during the following steps, so stopping early wastes a few steps. On a CPU, the beginning of a
prompt that the last one had, too, with what was generated then, is not read again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value, one_line
from amoeba.core.graph_replays import replays_of
from amoeba.decoding.cache import cache_of, why_more_than_keys, why_not_fixed
from amoeba.decoding.cpu_step import CpuStep, NativeModel, native_model
from amoeba.decoding.fused_layers import reads_documents
from amoeba.decoding.rotations import Rotations
from amoeba.decoding.sampling import Sampler, Sampling
from amoeba.decoding.step import Choose, Rows, Step, replays_in
from amoeba.decoding.trial import is_promised, raise_if_it_waits, raise_if_wrong
from amoeba.integrations.compiled_layers import decoder_layers
from amoeba.integrations.coverage import why_waits
from amoeba.integrations.exact_mode import is_exact
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.text_model import text_config

AHEAD = 4  # steps on their way to the GPU before one is waited for
SHORTEST_CACHE = 512  # lengths are rounded up to powers of two from here, so that compiled code is found again
# Tokens of all rows. Where attention needs a mask, that costs more than the host above it.
CAPTURED_PROMPT, CAPTURED_WITH_MASK = 8192, 512
SHORTEST_PIECE = 16
PIECE = 8192  # tokens of all rows of a longer prompt that are read at once


def cache_length(tokens: int) -> int:
    return max(SHORTEST_CACHE, _power_of_2(tokens))


def prompt_length(tokens: int) -> int:
    """As many as the graph reads that reads a prompt: an eighth more at most, so that few graphs serve all lengths."""
    return max(SHORTEST_PIECE, -(-tokens // (step := max(1, _power_of_2(tokens) // 16))) * step)


class Decoder:
    """capture: steps as CUDA graphs; where the model is on a GPU if nothing is said.
    compiled: decoder layers through torch.compile, which takes a minute the first time.
    choose: another choice of tokens than by `sampling`.
    prompt_sizes: tokens that captured prompts are filled up to, ascending; None: to one of `prompt_length`.
    native: the model as the C++ core computes its steps, see `cpu_step.native_model`; None: by transformers' layers.
    return_logprobs: `logprobs` returns those of the new tokens."""

    def __init__(
        self,
        model: Any,
        *,
        batch: int = 1,
        length: int,
        sampling: Sampling | None = None,
        capture: bool | None = None,
        compiled: bool = False,
        choose: Choose | None = None,
        prompt_sizes: Sequence[int] | None = None,
        native: NativeModel | None = None,
        return_logprobs: bool = False,
    ) -> None:
        self.model, self.device, self.batch, self.native = model, model.device, batch, native
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.cache = cache_of(model, cache_length(length), self.device)
        self._rows = Rows(model, self.cache, batch, self.device)
        vocabulary = text_config(model.config).vocab_size
        self._sampling = sampling or Sampling()
        self._sampler = Sampler(batch, vocabulary, self.device)
        for row in range(batch):
            self._sampler.begin(row, self._sampling, 0)
        uses = self._sampler.uses([0])
        self._choose = choose or functools.partial(self._sampler.choose, uses=uses)
        self._logprob_BL: Tensor | None = None
        if return_logprobs:
            self._logprob_BL = torch.zeros(batch, self.cache.length, dtype=torch.float32, device=self.device)
            self._chosen = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._exact = is_exact(model)
            self._choose = functools.partial(self._choose_and_note, self._choose)
        self._step: Step | CpuStep
        if native is None:
            self._step = Step(model, self._rows, self._choose, compiled=compiled)
        else:
            is_greedy = choose is None and not any(uses) and not return_logprobs
            self._step = CpuStep(native, self._rows, None if is_greedy else self._choose)
        self._keeps = native is not None and batch == 1
        self._held: list[int] = []  # tokens whose keys and values the cache has, where it keeps them
        self._waits_for_experts = replays_in(model) is not None  # many tokens ask for more than there is room for
        self._prompt_steps: dict[int, Step] = {}
        self._prompt_sizes = prompt_sizes
        self._prepared = self._is_trial = False

    def prepare(self, prompt_tokens: int) -> None:
        """For prompts as long as this. What `generate` would otherwise do before its first token."""
        self._prepare_steps()
        self.prepare_prompt(prompt_tokens)

    def rehearse(self, prompt_tokens: int = 0) -> None:
        """Launches all that reading such a prompt does, or a step without one, and captures nothing."""
        if not prompt_tokens:
            self._step.rehearse()
        elif self._captures_prompt(prompt_tokens):
            self._new_prompt_step(prompt_tokens).rehearse()
        else:
            ids_BL = torch.zeros(self.batch, prompt_tokens, dtype=torch.int64, device=self.device)
            self._read_in_pieces(ids_BL, ids_BL)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0) -> Iterator[list[int]]:
        """The new tokens of all rows, step by step; who has enough stops asking."""
        prompt_BL, pad_B = self._checked(prompts, max_new_tokens)
        self.prepare(prompt_BL.shape[1])
        self._begin(prompts, pad_B, seed)
        return self._tokens(prompt_BL, pad_B, max_new_tokens)

    def logprobs(self, count: int) -> Tensor:
        """(B, count) on the host, fp32: of the first new tokens of all rows, as `Sampler.logprobs` defines them."""
        if self._logprob_BL is None:
            raise bad_value("logprobs", "a Decoder that notes them", "another", "pass return_logprobs=True")
        return self._logprob_BL[:, :count].cpu()

    def _choose_and_note(self, choose: Choose, logits_BV: Tensor) -> Tensor:
        token_B = choose(logits_BV)
        logprob_B = self._sampler.logprobs(logits_BV, token_B, self._exact)
        self._logprob_BL.index_copy_(1, self._chosen, logprob_B[:, None])  # type: ignore[union-attr]
        self._chosen.add_(1).clamp_(max=self.cache.length - 1)  # steps that are rehearsed note too
        return token_B

    def plain_step(self, prompt: Sequence[int]) -> Callable[[], None]:
        """A step after this prompt, as it is: not captured."""
        prompt_BL, pad_B = self._checked([prompt], 2)
        self._begin([prompt], pad_B, seed=0)
        self._read_as_it_is(prompt_BL, torch.arange(len(prompt), dtype=torch.int64, device=self.device)[None])
        self._rows.rotations.reach(len(prompt) + 1)
        return Step(self.model, self._rows, self._choose)

    def held(self, ids: Sequence[int]) -> int:
        """How many tokens of this prompt, from its first, are in the cache already and are not read again. The last one
        always is: its logits are asked for."""
        pairs = zip(self._held, ids[:-1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def read_all(self, prompts: Sequence[Sequence[int]], known: int = 0) -> None:
        """Prompts, of which the cache has the first `known` tokens: `choose` is given the logits after them."""
        prompt_BL, pad_B = self._checked(prompts, 1)
        self._begin(prompts, pad_B, 0)
        self._read_prompts(prompt_BL, pad_B, known)

    def prepare_prompt(self, tokens: int) -> None:
        if self._captures_prompt(tokens):
            self._prompt_step(tokens)

    def _checked(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Tensor, Tensor]:
        prompt_BL, pad_B = self._padded(prompts)
        tokens = prompt_BL.shape[1]
        if tokens + max_new_tokens - 1 > self.cache.length:
            raise bad_value(
                "length",
                f"{tokens + max_new_tokens - 1} or more: the prompt and {max_new_tokens} new tokens",
                self.cache.length,
                "make a Decoder with a longer cache",
            )
        return prompt_BL, pad_B

    def _tokens(self, prompt_BL: Tensor, pad_B: Tensor, count: int) -> Iterator[list[int]]:
        out, ahead = Outlet(self._rows.token_B1), AHEAD if self.capture else 0
        self._read_prompts(prompt_BL, pad_B)
        length = prompt_BL.shape[1]
        out.send()
        for _ in range(count - 1):
            if len(out) > ahead:
                yield self._received(out)
            length += 1
            read = out.last if self._keeps else []
            self._step_at(length)
            self._held += read  # only now: an interruption may come before
            out.send()
        while len(out):
            yield self._received(out)

    def _step_at(self, tokens: int) -> None:
        """The step whose token is this one of the longest row."""
        self._rows.rotations.reach(tokens)
        self._step()

    def _received(self, out: Outlet) -> list[int]:
        tokens = out.receive()
        self._step.check()
        return tokens

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        if len(prompts) != self.batch or not all(prompts):
            raise bad_value(
                "prompts",
                f"{self.batch}, none of them empty",
                [len(prompt) for prompt in prompts],
                "make a Decoder for as many rows as there are prompts",
            )
        tokens = max(len(prompt) for prompt in prompts)
        # nothing attends to what comes before a prompt; a token of its own there is not penalised for being there
        rows = [[prompt[0]] * (tokens - len(prompt)) + list(prompt) for prompt in prompts]
        pads = [tokens - len(prompt) for prompt in prompts]
        prompt_BL, pad_B = (torch.tensor(each, dtype=torch.int64, device=self.device) for each in (rows, pads))
        return prompt_BL, pad_B

    def _begin(self, prompts: Sequence[Sequence[int]], pad_B: Tensor, seed: int) -> None:
        self.cache.begin()
        if self._logprob_BL is not None:
            self._chosen.zero_()
            self._exact = is_exact(self.model)
        self._rows.rotations.reach(1)  # transformers would keep what a longer text before this one left
        slots = torch.arange(self.cache.length, dtype=torch.int64, device=self.device)
        self._rows.live_BL.copy_(slots[None] >= pad_B[:, None])
        for row, ids in enumerate(prompts):
            self._sampler.begin(row, self._sampling, seed + row, ids)

    def _read_prompts(self, prompt_BL: Tensor, pad_B: Tensor, known: int = 0) -> None:
        tokens = prompt_BL.shape[1]
        position_BL = (torch.arange(tokens, dtype=torch.int64, device=self.device) - pad_B[:, None]).clamp(min=0)
        if not known and self._captures_prompt(tokens):
            step = self._prompt_step(tokens)
            step.ids_BC[:, :tokens] = prompt_BL
            step.position_BC[:, :tokens] = position_BL
            step.last.fill_(tokens - 1)
            self._rows.rotations.reach(tokens)
            step()
            return
        self._read_as_it_is(prompt_BL, position_BL, known)

    def _read_as_it_is(self, prompt_BL: Tensor, position_BL: Tensor, known: int = 0) -> None:
        tokens = prompt_BL.shape[1]
        ids = prompt_BL[0].tolist() if self._keeps else []
        known, self._held = max(known, self.held(ids)), []
        logits_BV = self._read_in_pieces(prompt_BL, position_BL, known)
        self._held = ids
        self.cache.slot.fill_(tokens)
        self._rows.position_B1.copy_(position_BL[:, -1:] + 1)
        self._rows.token_B1.copy_(self._choose(logits_BV)[:, None])

    @torch.no_grad()
    def _read_in_pieces(self, prompt_BL: Tensor, position_BL: Tensor, known: int = 0) -> Tensor:
        """known: tokens whose keys and values the cache has already."""
        tokens = prompt_BL.shape[1]
        size = tokens if self.cache.states else max(1, PIECE // self.batch)
        for first in range(known, tokens, size):
            end = min(first + size, tokens)
            self.cache.filled = first
            out = self.model(
                input_ids=prompt_BL[:, first:end],
                position_ids=position_BL[:, first:end],
                attention_mask=self._rows.live_BL[:, :end] if self.batch > 1 else None,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1]

    def _captures_prompt(self, tokens: int) -> bool:
        if not self.capture or self._waits_for_experts or self.cache.states:
            return False  # a state would take in what comes after the prompt
        most = CAPTURED_PROMPT if self._reads_documents else CAPTURED_WITH_MASK
        if self._prompt_sizes is not None and tokens > self._prompt_sizes[-1]:
            return False
        return self._filled_up(tokens) * self.batch <= most

    @functools.cached_property
    def _reads_documents(self) -> bool:
        return reads_documents(self.model)

    def _prepare_steps(self) -> None:
        if not self._prepared:
            self._prepared = True
            if self.capture and not self._is_trial:
                self._try()
            self._step.prepare(self.capture)

    def _try(self) -> None:
        """CannotCapture where a step would fail or be wrong. transformers' promise is trusted for keys and values."""
        promised = is_promised(self.model)
        if promised and why_more_than_keys(self.model.config) is None:
            return
        trial = Decoder(self.model, length=SHORTEST_CACHE, capture=True)
        trial._is_trial = True
        raise_if_it_waits(self.model, trial)
        if not promised:
            raise_if_wrong(self.model, trial)

    def _prompt_step(self, tokens: int) -> Step:
        size = self._prompt_size(tokens)
        if size not in self._prompt_steps:
            step = self._new_prompt_step(tokens)
            step.prepare(self.capture)
            self._prompt_steps[size] = step
        return self._prompt_steps[size]

    def _new_prompt_step(self, tokens: int) -> Step:
        return Step(self.model, self._rows, self._choose, tokens=self._prompt_size(tokens))

    def _prompt_size(self, tokens: int) -> int:
        return min(self._filled_up(tokens), self.cache.length)

    def _filled_up(self, tokens: int) -> int:
        if self._prompt_sizes is None:
            return prompt_length(tokens)
        return next(size for size in self._prompt_sizes if size >= tokens)


class Outlet:
    """Tokens on their way to the host, in order."""

    def __init__(self, token_B1: Tensor) -> None:
        self._token_B1 = token_B1
        self._array = None if token_B1.device.type == "cuda" else token_B1.numpy()
        self.last: list[int] = []  # of a CPU: what was sent last
        self._sent: deque[tuple[Tensor, torch.cuda.Event] | list[int]] = deque()
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []

    def __len__(self) -> int:
        return len(self._sent)

    def send(self) -> None:
        if self._array is not None:
            self.last = [token for (token,) in self._array.tolist()]
            self._sent.append(self.last)
            return
        if not self._free:
            host = torch.empty(self._token_B1.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            self._free.append((host, torch.cuda.Event()))
        host, event = self._free.pop()
        host.copy_(self._token_B1, non_blocking=True)
        event.record()
        self._sent.append((host, event))

    def receive(self) -> list[int]:
        sent = self._sent.popleft()
        if isinstance(sent, list):
            return sent
        host, event = sent
        event.synchronize()
        self._free.append((host, event))
        return host.flatten().tolist()


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# What `Sampler` computes
_PROCESSORS = frozenset({"MinP", "RepetitionPenalty", "Temperature", "TopK", "TopP"})
# What a generation_config may ask of the loop itself, apart from processing logits
_OF_THE_LOOP = ("min_new_tokens", "stop_strings", "max_time", "prompt_lookup_num_tokens", "penalty_alpha")


def why_not(model: Any) -> str | None:
    """None, or why the steps of this model are no fixed sequence of kernels. Where transformers does not promise that
    they are, `Decoder.prepare` tries some, and raises CannotCapture if they are not."""
    if (reason := _why_unknown(model)) is not None:
        return reason
    if (reason := why_waits(model)) is not None:
        return reason
    if len({parameter.device for parameter in model.parameters()}) > 1 or getattr(model, "hf_device_map", None):
        return "its parameters are on several devices"
    if len(replays_of(placed_in(module) for module in experts_modules(model).values())) > 1:
        return "its experts are streamed through several memories, which would wait for each other"
    if (reason := why_not_fixed(model.config) or Rotations(model).why_not()) is not None:
        return reason
    try:
        decoder_layers(model)
    except NotImplementedError as error:
        return str(error)
    return None


def why_no_slots(model: Any) -> str | None:
    """None, or why texts of different lengths cannot be the rows of one cache."""
    if (reason := _why_unknown(model) or why_more_than_keys(model.config)) is not None:
        return reason
    if (rotations := Rotations(model)) or rotations.why_not() is not None:
        return "its rotary embedding changes with the length"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention is not dispatched by transformers"
    return None


def _why_unknown(model: Any) -> str | None:
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not a class of transformers, so its steps are unknown"
    return None


def native_steps(model: Any, dense: str = "auto") -> NativeModel | str:
    """The model as the C++ core computes its steps on a CPU, for `Decoder(native=...)`; or why it does not.
    dense: "int8": it reads weights that are not experts in int8."""
    try:
        decoder_layers(model)
    except NotImplementedError as error:
        return str(error)
    return why_no_slots(model) or native_model(model, dense)


def why_not_chosen(model: Any, config: Any) -> str | None:
    """None, or what the generation_config asks for that `Sampler` and `Decoder` do not do."""
    if asked := [name for name in _OF_THE_LOOP if getattr(config, name, None)]:
        return f"its generation_config has {', '.join(asked)}"
    if config.use_cache is False:
        return "its generation_config turns the cache off"
    config = copy.copy(config)
    config._eos_token_tensor = None  # which `generate` makes, and some processors look for
    try:
        processors = model._get_logits_processor(config, 1)
    except Exception as error:  # private to transformers, and by what a config may hold
        return f"transformers cannot build logits processors from its generation_config ({one_line(error)})"
    names = {re.sub("Logits(Processor|Warper)$", "", type(processor).__name__) for processor in processors}
    others = sorted(names - _PROCESSORS)
    return f"its generation_config asks for {', '.join(others)}, which our steps do not support" if others else None
