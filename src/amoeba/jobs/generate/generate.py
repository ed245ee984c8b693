"""Generates text with a Hugging Face model whose experts aMoEba computes, and streams it to the caller.

    report = generate("models/tiny", "Once upon", GenerationOptions(temperature=0.7, seed=1), write=print)
    report.text, report.generation_tokens_per_second

Times are taken after one warm-up token and after what has to be compiled or captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from amoeba.core.log import logger
from amoeba.integrations.images import ImageReader
from amoeba.integrations.text_model import text_config
from amoeba.jobs.generate.loaded_model import LoadedModel, ModelReport, find_model, load
from amoeba.jobs.generate.options import GenerationOptions, end_ids
from amoeba.jobs.generate.prompt_tokens import most_new_tokens, prompt_with_images, tokenise
from amoeba.jobs.generate.token_steps import Steps, choose_steps, warn_of_dense
from amoeba.jobs.streaming_report import StreamParts
from amoeba.parallel.rank_zero import ALONE, RankZero

__all__ = ["GenerationOptions", "GenerationReport", "generate"]


@dataclass(frozen=True, kw_only=True)
class GenerationReport(ModelReport):
    generated_ids: list[int]
    text: str
    stopped: Literal["end of text", "length", "interrupted"]
    seconds_to_first_token: float | None  # after loading and preparing; None: interrupted before it
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None  # from the first token to the last; None with fewer than two
    experts: str  # "amoeba", or "transformers" where there was nothing to take over


def generate(
    model_folder: str | Path,
    prompt: str,
    options: GenerationOptions,
    write: Callable[[str], object],
    adapter: str | Path | None = None,
    say: Callable[[str], object] = lambda text: None,
    rank_zero: RankZero = ALONE,
) -> GenerationReport:
    """Calls write(piece) for every piece of text; a KeyboardInterrupt while generating ends it with a report.

    model_folder: as save_pretrained writes it, or the name of a model on the hub.
    adapter: a PEFT folder or a run of `amoeba finetune`; its tokenizer, if it has one, is used.
    say: is told in one line, before the first token, what computes; the log has the reasons.
    rank_zero: the ranks over which the experts are; each calls this with the same, and gets the same text.
    """
    found = find_model(model_folder, adapter, options, rank_zero)
    given: dict[str, torch.Tensor] = {}
    if options.images:
        trust = options.trust_remote_code
        reader = ImageReader(found.name, found.config, found.tokenizer, trust_remote_code=trust)
        given = prompt_with_images(reader, found.tokenizer, prompt, options.images)
        prompt_ids = reader.ids(given)
    else:
        prompt_ids = tokenise(found.tokenizer, prompt, options.chat)
    most = most_new_tokens(found.config, prompt_ids, options.max_new_tokens)
    with closing(load(found, options, prompt_ids[0], say, rank_zero)) as loaded:
        return _generate(loaded, prompt_ids, given, most, options, write, rank_zero)


def _generate(
    loaded: LoadedModel,
    prompt_ids: list[int],
    given: dict[str, torch.Tensor],
    most: int,
    options: GenerationOptions,
    write: Callable[[str], object],
    rank_zero: RankZero,
) -> GenerationReport:
    model, device = loaded.model, loaded.device
    seed, sampling = loaded.begin(options, most, rank_zero)
    parts = StreamParts(loaded.streamed)
    stream = TokenStream(loaded.tokenizer, write, at_first=lambda: parts.begin("decode"))
    interrupted = False
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        steps = Steps("plain", "transformers reads the images of a prompt", None, 0.0)
        if not given:
            told: dict[str, Any] = {"compile": options.compile, "dense": options.dense}
            steps = choose_steps(model, sampling, batch=1, prompt_tokens=len(prompt_ids), new_tokens=most, **told)
        logger.info("steps %s: %s", steps.kind, steps.reason)
        warn_of_dense(options.dense, steps.kind, steps.reason)
        began = time.perf_counter()
        parts.begin("prefill")
        try:
            stream_tokens(model, steps, prompt_ids, most, seed, stream, given=given)
        except KeyboardInterrupt:
            interrupted = True
            stream.end()
    parts.end()
    count = len(stream.ids)
    first = stream.first_at - began if count else None
    ended = bool(stream.ids) and stream.ids[-1] in end_ids(model)
    return GenerationReport(
        prompt_tokens=len(prompt_ids),
        generated_tokens=count,
        generated_ids=stream.ids,
        text="".join(stream.pieces),
        stopped="interrupted" if interrupted else "end of text" if ended else "length",
        prepare_seconds=loaded.warm_up_seconds + steps.seconds,
        seconds_to_first_token=first,
        prompt_tokens_per_second=len(prompt_ids) / first if first else None,
        generation_tokens_per_second=(count - 1) / (stream.last_at - stream.first_at) if count > 1 else None,
        experts="transformers" if loaded.backend is None else "amoeba",
        steps=steps.kind,
        steps_reason=steps.reason,
        sampling=sampling,
        seed=seed,
        streaming=parts.report(),
        **loaded.facts(),
    )


def stream_tokens(
    model: Any,
    steps: Steps,
    prompt_ids: list[int],
    most: int,
    seed: int,
    stream: TokenStream,
    cache: Any = None,
    given: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """cache: of transformers, which holds the beginning of the prompt; for steps without a decoder. given: of a prompt
    with images, what the model reads."""
    if steps.decoder is None:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt_ids], dtype=torch.int64, device=model.device)
        more = choosing(model, seed) | ({} if cache is None else {"past_key_values": cache})
        read: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, value in given.items():
            read[name] = value.to(model.device, model.dtype if value.is_floating_point() else None)
        model.generate(**read, streamer=stream, **more)
        return
    ends = set(end_ids(model))
    for (token,) in steps.decoder.generate([prompt_ids], most, seed):
        stream.add([token])
        if token in ends:
            break
    stream.end()


def choosing(model: Any, seed: int) -> dict[str, Any]:
    """For transformers' `generate`, where it samples: that it draws as our steps and `amoeba serve` do. A config that
    asks for more than these have keeps transformers' own choice."""
    from amoeba.decoding.decoder import why_not_chosen
    from amoeba.decoding.sampling import Sampler, Sampling

    config = model.generation_config
    if not config.do_sample or why_not_chosen(model, config) is not None:
        return {}
    sampler = Sampler(1, text_config(model.config).vocab_size, model.device)
    # transformers applies the penalty itself, before
    sampling = Sampling(True, config.temperature, config.top_k or 0, config.top_p, min_p=config.min_p or 0.0)
    sampler.begin(0, sampling, seed)
    uses = sampler.uses([0])
    processor = [lambda ids, scores: sampler.scores(scores, uses)]
    off = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    return {"do_sample": False, **off, "logits_processor": processor}


_REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no character, or not one yet


class TokenStream:
    """The streamer that transformers calls with every token, the prompt's first; `add` is for new tokens alone.

    ids[prefix:read] was written last and is decoded again together with the new tokens, since a tokenizer may drop
    the space at the start of what it decodes. Text that ends inside a character waits for the rest of it.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], object], at_first: Callable[[], object] = lambda: None
    ) -> None:
        """at_first: is called when the first token is there."""
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.first_at = self.last_at = 0.0
        self._tokenizer, self._write, self._at_first = tokenizer, write, at_first
        self._prefix = self._read = 0
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self.add(value.flatten().tolist())

    def add(self, ids: list[int]) -> None:
        self.last_at = time.perf_counter()
        if not self.ids:
            self.first_at = self.last_at
            self._at_first()
        self.ids += ids
        self._emit(final=False)

    def end(self) -> None:
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        text = self._decode(self.ids[self._prefix :])
        fresh = text[len(self._decode(self.ids[self._prefix : self._read])) :]
        if not fresh or (fresh.endswith(_REPLACEMENT) and not final):
            return
        # Noted before it is written: an interruption in between must not write it twice
        self._prefix, self._read = self._read, len(self.ids)
        self.pieces.append(fresh)
        self._write(fresh)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
