"""Answers the prompts of a file and writes each answer, a JSON object per line, as soon as it is complete.

prompts = read_prompts(Path("questions.txt"), chat=False)
results = Results(Path("answers.jsonl"), prompts, "models/base")        # without those that have an answer already
report = generate_prompts("models/base", results, GenerationOptions(), slots=8)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.data.sources import Prompt, parse_json, read_text
from amoeba.jobs.generate import token_steps
from amoeba.jobs.generate.loaded_model import LoadedModel, ModelReport, find_model, load
from amoeba.jobs.generate.options import GenerationOptions, end_ids
from amoeba.jobs.generate.prompt_tokens import most_new_tokens, tokenise
from amoeba.jobs.generate.token_steps import Kind
from amoeba.jobs.streaming_report import StreamParts
from amoeba.parallel.rank_zero import ALONE, RankZero

# Answers generated at once. Not measured yet.
GPU_BATCH, CPU_BATCH = 32, 8


class Row(NamedTuple):
    """most: new tokens."""

    prompt: Prompt
    ids: list[int]
    most: int


Answer = tuple[Row, list[int]]


@dataclass(frozen=True, kw_only=True)
class PromptsReport(ModelReport):
    prompts: int  # answered in this run
    skipped: int  # had a result before
    stopped: Literal["done", "interrupted"]
    seconds: float  # after loading and preparing, to the last answer
    generated_tokens_per_second: float | None
    batching: str | None
    batching_reason: str


def generate_prompts(
    model_folder: str | Path,
    results: Results,
    options: GenerationOptions,
    slots: int | None = None,
    adapter: str | Path | None = None,
    say: Callable[[str], object] = lambda text: None,
    progress: Callable[[str], object] = lambda text: None,
    rank_zero: RankZero = ALONE,
) -> PromptsReport:
    """A KeyboardInterrupt ends it with a report; what is answered by then is written.

    slots: prompts that are answered at once; None: as many as the device takes well.
    say: is told in one line what computes. progress: after each answer, how far it is.
    rank_zero: the ranks over which the experts are; each calls this with the same prompts left.
    """
    if slots is not None and slots < 1:
        raise bad_value("batch_size", "at least 1", slots, "leave it out for the default")
    options.check_batched()
    found = find_model(model_folder, adapter, options, rank_zero)
    rows = []
    for prompt in results.left:
        ids = tokenise(found.tokenizer, prompt.content, options.chat, prompt.place)
        rows.append(Row(prompt, ids, most_new_tokens(found.config, ids, options.max_new_tokens, prompt.place)))
    run = _Run(results, len(rows), progress, options.dense)
    if not rows:
        say("all prompts are already answered")
        return run.report(None)
    with closing(load(found, options, rows[0].ids[0], say, rank_zero)) as loaded:
        run.seed, run.sampling = loaded.begin(options, options.max_new_tokens, rank_zero)
        run.began, run.parts = time.perf_counter(), StreamParts(loaded.streamed)
        devices = [loaded.device] if loaded.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                for row, ids in run.answers(loaded, rows, slots):
                    run.answered(row, ids, loaded)
        except KeyboardInterrupt:
            run.stopped = "interrupted"
        return run.report(loaded)


class _Run:
    def __init__(self, results: Results, count: int, progress: Callable[[str], object], dense: str) -> None:
        self.results, self.count, self.progress, self.dense = results, count, progress, dense
        self.stopped: Literal["done", "interrupted"] = "done"
        self.began = time.perf_counter()
        self.answers_given = self.prompt_tokens = self.generated_tokens = 0
        self.prepare_seconds = 0.0
        self.batching: str | None = None
        self.batching_reason = self.steps_reason = ""
        self.steps: Kind | None = None
        self.seed: int | None = None
        self.sampling: dict[str, Any] = {}
        self.parts = StreamParts(None)

    def answered(self, row: Row, ids: list[int], loaded: LoadedModel) -> None:
        ended = bool(ids) and ids[-1] in end_ids(loaded.model)
        text = loaded.tokenizer.decode(ids, skip_special_tokens=True)
        facts: dict[str, Any] = {"text": text, "prompt_tokens": len(row.ids), "generated_tokens": len(ids)}
        facts |= {"stopped": "end of text" if ended else "length", "seed": self.seed}
        self.results.add(row.prompt, facts)
        self.answers_given += 1
        self.prompt_tokens += len(row.ids)
        self.generated_tokens += len(ids)
        speed = self.generated_tokens / self.seconds()
        self.progress(f"{self.answers_given} of {self.count} prompts, {speed:.1f} tokens/s")

    def seconds(self) -> float:
        return time.perf_counter() - self.began - self.prepare_seconds

    def report(self, loaded: LoadedModel | None) -> PromptsReport:
        seconds = self.seconds() if loaded is not None else 0.0
        names = ("prompt_tokens", "generated_tokens", "stopped", "batching", "batching_reason", "steps", "steps_reason")
        return PromptsReport(
            prompts=self.answers_given,
            skipped=self.results.skipped,
            prepare_seconds=self.prepare_seconds + (loaded.warm_up_seconds if loaded else 0.0),
            seconds=seconds,
            generated_tokens_per_second=self.generated_tokens / seconds if self.generated_tokens else None,
            sampling=self.sampling,
            seed=self.seed,
            streaming=self.parts.report(),
            **{name: getattr(self, name) for name in names},
            **(loaded.facts() if loaded else {}),
        )

    def answers(self, loaded: LoadedModel, rows: Sequence[Row], slots: int | None) -> Iterator[Answer]:
        from amoeba.decoding.decoder import why_not_chosen

        reason = why_not_chosen(loaded.model, loaded.model.generation_config)
        if reason is not None:
            self.batching, self.batching_reason, self.steps, self.steps_reason = "none", reason, "plain", reason
            logger.info("one prompt after another: %s", reason)
            token_steps.warn_of_dense(self.dense, "plain", reason)
            self.parts.begin("prompts")
            yield from self._one_by_one(loaded, rows)
            return
        yield from self._by_engine(loaded, rows, slots or (GPU_BATCH if loaded.device.type == "cuda" else CPU_BATCH))

    def _by_engine(self, loaded: LoadedModel, rows: Sequence[Row], slots: int) -> Iterator[Answer]:
        from amoeba.decoding.engine import End, Engine, Request, Token
        from amoeba.decoding.sampling import Sampling

        assert self.seed is not None
        began = time.perf_counter()
        length = max(len(row.ids) + row.most for row in rows) - 1
        capture = token_steps.why_no_graphs(loaded.device) is None
        told: dict[str, Any] = {"capture": capture, "streams": loaded.streamed is not None, "dense": self.dense}
        engine = Engine(loaded.model, slots=min(slots, len(rows)), length=length, **told)
        self.prepare_seconds = time.perf_counter() - began
        self.batching, self.batching_reason = "continuous", f"{engine.slots} at once"
        self.steps, self.steps_reason = engine.kind, engine.reason
        logger.info("steps %s: %s", engine.kind, engine.reason)
        token_steps.warn_of_dense(self.dense, engine.kind, engine.reason)
        self.parts.begin("prompts")
        done: list[Answer] = []

        def submit(row: Row) -> None:
            ids: list[int] = []

            def receive(told: Token | End) -> None:
                if isinstance(told, Token):
                    ids.append(told.id)
                elif told.reason in ("stop", "length"):
                    done.append((row, ids))

            seed = (self.seed or 0) + row.prompt.line
            ends = frozenset(end_ids(loaded.model))
            engine.submit(Request(row.ids, row.most, receive, Sampling(**self.sampling), seed % 2**63, ends))

        for row in sorted(rows, key=lambda row: -len(row.ids)):  # if memory is too small, that shows at once
            submit(row)
        while engine.busy:
            engine.advance()
            if engine.failure is not None:
                raise engine.failure
            yield from done
            done.clear()

    def _one_by_one(self, loaded: LoadedModel, rows: Sequence[Row]) -> Iterator[Answer]:
        assert self.seed is not None
        for row in rows:
            torch.manual_seed(self.seed + row.prompt.line)
            ids = torch.tensor([row.ids], dtype=torch.int64, device=loaded.device)
            out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=row.most)
            yield row, out[0, len(row.ids) :].tolist()


_BEGIN = b'{"line": '


def _words(settings: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) if isinstance(settings, dict) else "others"


class Results:
    """path: None for `write`, line by line. model: what the results are of, in words. settings: how tokens are chosen,
    which each result repeats and a later run must share."""

    def __init__(
        self,
        path: Path | None,
        prompts: Sequence[Prompt],
        model: str,
        write: Callable[[str], object] = print,
        settings: Mapping[str, Any] = {},
    ) -> None:
        self.path, self.model, self._write, self.settings = path, model, write, dict(settings)
        done = set() if path is None else self._done({prompt.line: prompt for prompt in prompts})
        self.skipped = len(done)
        self.left = [prompt for prompt in prompts if prompt.line not in done]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a"):  # what cannot be written is known before a model is loaded
                pass

    def add(self, prompt: Prompt, facts: dict[str, Any]) -> None:
        record = {"line": prompt.line, "model": self.model, "prompt": prompt.as_json(), **facts}
        if self.settings:
            record["settings"] = self.settings
        line = json.dumps(record, ensure_ascii=False)
        if self.path is None:
            self._write(line)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _done(self, prompts: dict[int, Prompt]) -> set[int]:
        """The lines of the prompts that the file has answers to; ValueError where it holds anything else."""
        assert self.path is not None
        if not self.path.exists():
            return set()
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if data[whole:] and not (data[whole:].startswith(_BEGIN) or _BEGIN.startswith(data[whole:])):
            raise self._of_another_run(f"{self.path}, its last line")
        done = set()
        for number, line in enumerate(read_text(self.path).split("\n")[:-1], start=1):
            place = f"{self.path}, line {number}"
            try:
                record = parse_json(line, place)
            except ValueError as error:
                raise self._of_another_run(place) from error
            line_of = record.get("line") if isinstance(record, dict) else None
            known = prompts.get(line_of) if isinstance(line_of, int) else None
            if known is None or (record.get("prompt"), record.get("model")) != (known.as_json(), self.model):
                raise self._of_another_run(place)
            if (theirs := record.get("settings", self.settings)) != self.settings:
                remedy = "give the options of the run that began the file, or name another --out"
                raise bad_value(place, f"an answer with {_words(self.settings)}", _words(theirs), remedy)
            done.add(known.line)
        os.truncate(self.path, whole)  # a run may have been killed while it wrote one more
        return done

    def _of_another_run(self, place: str) -> ValueError:
        expected = f"results of these prompts with {self.model}, to continue after them"
        return bad_value(place, expected, "something else", "name another --out, or move the file away")
