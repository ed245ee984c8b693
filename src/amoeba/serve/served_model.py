"""A model that answers requests: loaded with its adapters, and its engine in a thread of its own.

with closing(open_model("models/qwen3", options, adapters={"chat": "runs/chat"}, slots=8, context=4096)) as served:
    served.names                                    # the model's, then its adapters'
    served.engine.submit(Request(ids, most, receive, served.sampling(), seed=1, ends=served.ends, lane="chat"))
    served.status()
"""

from __future__ import annotations

import collections
import functools
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from amoeba import lora
from amoeba.core.errors import bad_value
from amoeba.data.documents import by_template
from amoeba.decoding.engine import Engine
from amoeba.decoding.sampling import Sampling
from amoeba.integrations.model_folder import find_adapter, has_tokenizer, load_tokenizer
from amoeba.integrations.text_model import check_ids
from amoeba.jobs.convert.merge import check_not_merged
from amoeba.jobs.generate.generate_prompts import CPU_BATCH, GPU_BATCH
from amoeba.jobs.generate.loaded_model import LoadedModel, find_model, load
from amoeba.jobs.generate.options import GenerationOptions, end_ids, sampling_of
from amoeba.jobs.generate.prompt_tokens import checked_context
from amoeba.lora.attaching import put_on, take_off
from amoeba.serve.grammar import Grammars

DEFAULT_CONTEXT = 4096
_SECONDS = 5.0  # over which the speed is told


def open_model(
    model_folder: str | Path,
    options: GenerationOptions,
    *,
    name: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    slots: int | None = None,
    context: int | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> ServedModel:
    """options: for requests that do not say. name: of the model in requests; None: of its folder. slots: requests that
    are answered at once, for each adapter. context: tokens of a prompt and its answer at most."""
    options.check_batched()
    found = find_model(model_folder, None, options)
    if not name:  # the folder's; a run's, whose model is in a folder of that name
        path = Path(model_folder).expanduser()
        path = path.resolve() if path.is_dir() else path
        name = (path.parent.name if path.name == "model" else path.name) or str(model_folder)
    folders = {each: find_adapter(folder) for each, folder in (adapters or {}).items()}
    for folder in folders.values():
        check_not_merged(found.name, folder)
    if name in folders:
        raise bad_value("--adapter", f"a name other than the model's, {name}", name, "choose another, or --name")
    most = checked_context(found.config, context, DEFAULT_CONTEXT)
    if slots is not None and slots < 1:
        raise bad_value("--slots", "at least 1", slots, "leave it out")
    token = found.tokenizer("a")["input_ids"][:1] or [0]
    loaded = load(found, options, token[0], say, adapters_follow=bool(folders))
    try:
        rows = slots or (GPU_BATCH if loaded.device.type == "cuda" else CPU_BATCH)
        return ServedModel(loaded, options, name, folders, rows, most)
    except BaseException:
        loaded.close()
        raise


class ServedModel:
    def __init__(
        self,
        loaded: LoadedModel,
        options: GenerationOptions,
        name: str,
        adapters: Mapping[str, Path],
        slots: int,
        context: int,
    ) -> None:
        self.loaded, self.context = loaded, context
        self.names, self.began = [name, *adapters], time.time()
        self._options, self._own = options, loaded.model.generation_config
        self.ends = frozenset(end_ids(loaded.model))
        self.tokenizers = dict.fromkeys(self.names, loaded.tokenizer) | {
            each: load_tokenizer(str(folder), trust_remote_code=options.trust_remote_code)
            for each, folder in adapters.items()
            if has_tokenizer(folder)  # it may have a chat template that the model's has not
        }
        lanes = _lanes(loaded, name, adapters)
        with torch.random.fork_rng(devices=[loaded.device] if loaded.device.type == "cuda" else []):
            streams = loaded.streamed is not None
            self.engine = Engine(
                loaded.model, slots=slots, length=context, lanes=lanes, streams=streams, dense=options.dense
            )
        vocabulary = next(iter(self.engine._lanes.values())).rows.logits_BV.shape[-1]
        self.grammars = {name: Grammars(each, vocabulary, self.ends) for name, each in self.tokenizers.items()}
        self._speeds: collections.deque[tuple[float, int]] = collections.deque()
        self._thread = threading.Thread(target=self.engine.run, name="amoeba engine", daemon=True)
        self._thread.start()

    def why_ill(self) -> str | None:
        return self.engine.broken or (None if self._thread.is_alive() else "the engine has ended")

    def chat_ids(
        self,
        name: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        more: dict[str, Any] | None = None,
    ) -> list[int]:
        tokenizer = self.tokenizers[name]
        if not getattr(tokenizer, "chat_template", None):
            remedy = "use /v1/completions, or serve the family's chat model (its name often ends in Instruct)"
            raise bad_value("messages", "a tokenizer with a chat template", "one without", remedy)
        own = {"messages", "tokenizer", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
        if taken := sorted(own & set(more or {})):
            remedy = "leave it out; tools have a field of their own"
            raise bad_value("chat_template_kwargs", "variables of the chat template", ", ".join(taken), remedy)
        text = by_template(messages, tokenizer, add_generation_prompt=True, tools=tools, **(more or {}))
        return self._checked(tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_ids(self, name: str, prompt: str | list[int]) -> list[int]:
        return self._checked(self.tokenizers[name](prompt)["input_ids"] if isinstance(prompt, str) else prompt)

    def sampling(self, **given: float | None) -> Sampling:
        """Of a request: what it says, then what the server was started with, then the model's own."""
        min_p = given.pop("min_p", None)
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if min_p and "temperature" not in asked and self._options.temperature is None and not self._own.do_sample:
            asked["temperature"] = 1.0
        chosen = sampling_of(replace(self._options, **asked), self._own)
        if min_p is not None and chosen["do_sample"]:
            chosen["min_p"] = min_p
        return Sampling(**chosen)

    def seed(self, asked: int | None) -> int:
        chosen = asked if asked is not None else self._options.seed
        return secrets.randbelow(2**31) if chosen is None else chosen

    def most(self, ids: list[int], asked: int | None) -> int:
        """New tokens: those that were asked for, or as many as the context leaves."""
        return min(asked or self._options.max_new_tokens, self.context - len(ids) + 1)

    def status(self) -> dict[str, Any]:
        engine, now = self.engine, time.monotonic()
        self._speeds.append((now, engine.counts.generated_tokens))
        while len(self._speeds) > 2 and now - self._speeds[0][0] > _SECONDS:
            self._speeds.popleft()
        (before, tokens), seconds = self._speeds[0], max(now - self._speeds[0][0], 1e-9)
        loaded, counts = self.loaded, engine.counts
        found: dict[str, Any] = {"models": self.names, "device": str(loaded.device), "dtype": loaded.dtype}
        found |= {"experts": loaded.placement, "backend": loaded.backend, "steps": engine.kind}
        found |= {"steps_reason": engine.reason, "context": self.context, "slots": engine.slots}
        found |= {"active": engine.active, "waiting": engine.waiting}
        found["tokens_per_second"] = (counts.generated_tokens - tokens) / seconds if before < now else 0.0
        found |= {"prompt_tokens": counts.prompt_tokens, "shared_prompt_tokens": counts.shared_tokens}
        return found | {"generated_tokens": counts.generated_tokens, "expert_cache": self._expert_cache()}

    def stop(self, wait: float | None = None) -> None:
        """Waits until all that was submitted is answered, or so many seconds."""
        self.engine.stop()
        self._thread.join(wait)
        if self._thread.is_alive():
            self.engine.abandon("the server is stopping")
            self._thread.join(10)

    def close(self) -> None:
        self.stop(0)
        self.loaded.close()

    def _expert_cache(self) -> dict[str, Any] | None:
        streamed = self.loaded.streamed
        if streamed is None:
            return None
        counters = streamed.memory.cache.counters
        rates = {"hit_rate": counters.top_hit_rate, "host_hit_rate": counters.host_hit_rate}
        return {"memory": str(streamed.memory), "requested": counters.requested, "hits": counters.hits} | rates

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids or len(ids) > self.context:
            remedy = "write some text" if not ids else "shorten it, or start the server with a larger --context"
            raise bad_value("prompt", f"1 to {self.context} tokens", f"{len(ids)}", remedy)
        if min(ids) < 0:
            raise bad_value("prompt", "token ids of at least 0", min(ids), "use the model's tokenizer")
        check_ids(self.loaded.model.config, max(ids))
        return ids


def _lanes(loaded: LoadedModel, name: str, adapters: Mapping[str, Path]) -> dict[str, Callable[[], object]]:
    """What makes the model itself of it, or the model with one of its adapters."""
    model = loaded.model
    kept: dict[str, Any] = {}
    for each, folder in adapters.items():
        lora.load(model, folder)
        model.to(loaded.device)
        kept[each] = take_off(model)
    attached: list[str] = []

    def choose(wanted: str) -> None:
        if attached:
            take_off(model)
            attached.clear()
        if wanted in kept:
            put_on(model, kept[wanted])
            attached.append(wanted)

    return {each: functools.partial(choose, each) for each in (name, *adapters)}


def parse_adapters(given: Iterable[str]) -> dict[str, str]:
    """name=folder, each once."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not name or not equals or not folder or name in found:
            raise bad_value("--adapter", "name=folder, each name once", repr(each), "--adapter mine=runs/mine")
        found[name] = folder
    return found
