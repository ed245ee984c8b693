"""Answers the prompts of a file and writes each answer as soon as it is complete.

    prompts = read_prompts(Path("questions.txt"), chat=False)
    results = Results(Path("answers.jsonl"), prompts, "models/base")
    report = generate_prompts("models/base", results, GenerationOptions(), BatchOptions())

Results are one JSON object per line. Prompts that have one already are left out, so a later run continues an earlier
one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from amoeba.core.errors import bad_value
from amoeba.data.sources import Prompt, parse_json, read_text
from amoeba.integrations.precision import ProductsOfModel
from amoeba.jobs.generate.loaded_model import LoadedModel, find_model, load
from amoeba.jobs.generate.options import (
    GenerationOptions,
    end_ids,
    in_words,
    sampling_of,
    seed_for,
    set_generation_config,
)
from amoeba.jobs.generate.prompt_batches import (
    Answer,
    Row,
    batches_of,
    continuous,
    most_new_tokens,
    padded,
    tokenise,
    why_not_continuous,
)
from amoeba.jobs.generate.token_steps import Kind, choose_steps
from amoeba.jobs.streaming_report import StreamParts
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.stream.report import StreamReport
from amoeba.system.machine import peak_memory

logger = logging.getLogger("amoeba")

Batching = Literal["auto", "continuous", "padded"]
# Rows of a padded batch. Not measured yet.
GPU_BATCH, CPU_BATCH = 32, 8


@dataclass(frozen=True)
class BatchOptions:
    """batching: "auto" is continuous where transformers has it for the model, else padded.
    size: rows of a padded batch; None for as many as the device takes well."""

    batching: Batching = "auto"
    size: int | None = None

    def __post_init__(self) -> None:
        if self.batching not in ("auto", "continuous", "padded"):
            raise bad_value("batching", "auto, continuous or padded", repr(self.batching), "leave it out for auto")
        if self.size is not None and self.size < 1:
            raise bad_value("batch_size", "at least 1", self.size, "leave it out for the default")


@dataclass(frozen=True)
class PromptsReport:
    prompts: int  # answered in this run
    skipped: int  # had a result before
    prompt_tokens: int
    generated_tokens: int
    stopped: Literal["done", "interrupted"]
    load_seconds: float
    prepare_seconds: float
    seconds: float  # after both, to the last answer
    generated_tokens_per_second: float | None
    peak_memory_bytes: int | None
    device: str | None  # None, as what follows: there was nothing to do
    dtype: str | None
    placement: str | None
    backend: str | None
    backend_reason: str
    products: ProductsOfModel | None  # see `GenerationReport`
    batching: str | None
    batching_reason: str
    steps: Kind | None  # of padded batches
    steps_reason: str
    sampling: dict[str, Any]
    seed: int | None
    streaming: StreamReport | None  # what reading experts cost, where they are streamed


def generate_prompts(
    model_folder: str | Path,
    results: Results,
    options: GenerationOptions,
    batches: BatchOptions,
    adapter: str | Path | None = None,
    say: Callable[[str], object] = lambda text: None,
    progress: Callable[[str], object] = lambda text: None,
    rank_zero: RankZero = ALONE,
) -> PromptsReport:
    """A KeyboardInterrupt ends it with a report; what is answered by then is written.

    say: is told in one line what computes. progress: after each answer, how far it is.
    rank_zero: the ranks over which the experts are; each calls this with the same prompts left.
    """
    found = find_model(model_folder, adapter, options, rank_zero)
    rows = []
    for prompt in results.left:
        ids = tokenise(found.tokenizer, prompt.content, options.chat, prompt.place)
        rows.append(Row(prompt, ids, most_new_tokens(found.config, ids, options.max_new_tokens, prompt.place)))
    run = _Run(results, len(rows), progress)
    if not rows:
        say("all prompts are already answered")
        return run.report(None, None, {})
    with closing(load(found, options, rows[0].ids[0], say, rank_zero)) as loaded:
        return _generate(run, loaded, rows, batches, options, rank_zero)


def _generate(
    run: _Run,
    loaded: LoadedModel,
    rows: Sequence[Row],
    batches: BatchOptions,
    options: GenerationOptions,
    rank_zero: RankZero,
) -> PromptsReport:
    seed = seed_for(options, rank_zero)
    sampling = sampling_of(options, loaded.model.generation_config)
    set_generation_config(loaded.model, loaded.tokenizer, sampling, options.max_new_tokens)
    logger.info("sampling: %s, at most %d tokens, seed %d", in_words(sampling), options.max_new_tokens, seed)
    run.began, run.parts = time.perf_counter(), StreamParts(loaded.streamed)
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            for row, ids in _answers(run, loaded, rows, sampling, seed, batches, options):
                run.answered(row, ids, loaded, seed)
    except KeyboardInterrupt:
        run.stopped = "interrupted"
    return run.report(loaded, seed, sampling)


class _Run:
    """How far it is."""

    def __init__(self, results: Results, count: int, progress: Callable[[str], object]) -> None:
        self.results, self.count, self.progress = results, count, progress
        self.stopped: Literal["done", "interrupted"] = "done"
        self.began = time.perf_counter()
        self.answers = self.prompt_tokens = self.generated_tokens = 0
        self.prepare_seconds = 0.0
        self.batching: str | None = None
        self.batching_reason = self.steps_reason = ""
        self.steps: Kind | None = None
        self.parts = StreamParts(None)

    def answered(self, row: Row, ids: list[int], loaded: LoadedModel, seed: int) -> None:
        ended = bool(ids) and ids[-1] in end_ids(loaded.model)
        self.results.add(
            row.prompt,
            {
                "text": loaded.tokenizer.decode(ids, skip_special_tokens=True),
                "prompt_tokens": len(row.ids),
                "generated_tokens": len(ids),
                "stopped": "end of text" if ended else "length",
                "seed": seed,
            },
        )
        self.answers += 1
        self.prompt_tokens += len(row.ids)
        self.generated_tokens += len(ids)
        speed = self.generated_tokens / self.seconds()
        self.progress(f"{self.answers} of {self.count} prompts, {speed:.1f} tokens/s")

    def seconds(self) -> float:
        return time.perf_counter() - self.began - self.prepare_seconds

    def report(self, loaded: LoadedModel | None, seed: int | None, sampling: dict[str, Any]) -> PromptsReport:
        seconds = self.seconds() if loaded is not None else 0.0
        return PromptsReport(
            prompts=self.answers,
            skipped=self.results.skipped,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            stopped=self.stopped,
            load_seconds=loaded.load_seconds if loaded else 0.0,
            prepare_seconds=self.prepare_seconds + (loaded.warm_up_seconds if loaded else 0.0),
            seconds=seconds,
            generated_tokens_per_second=self.generated_tokens / seconds if self.generated_tokens else None,
            peak_memory_bytes=peak_memory(loaded.device) if loaded else None,
            device=str(loaded.device) if loaded else None,
            dtype=loaded.dtype if loaded else None,
            placement=loaded.placement if loaded else None,
            backend=loaded.backend if loaded else None,
            backend_reason=loaded.reason if loaded else "",
            products=loaded.products if loaded else None,
            batching=self.batching,
            batching_reason=self.batching_reason,
            steps=self.steps,
            steps_reason=self.steps_reason,
            sampling=sampling,
            seed=seed,
            streaming=self.parts.report(),
        )


def _answers(
    run: _Run,
    loaded: LoadedModel,
    rows: Sequence[Row],
    sampling: dict[str, Any],
    seed: int,
    batches: BatchOptions,
    options: GenerationOptions,
) -> Iterator[Answer]:
    model = loaded.model
    reason = "as requested" if batches.batching == "padded" else why_not_continuous(model)
    if reason is not None and batches.batching == "continuous":
        raise bad_value("batching", "one that supports this model", f"continuous: {reason}", "use padded or auto")
    if reason is None:
        run.batching, run.batching_reason = "continuous", "transformers' continuous batching"
        logger.info("batching continuous")
        failed = []
        for row, ids in continuous(model, rows, seed):
            if ids is None:
                failed.append(row)
            else:
                yield row, ids
        if not failed:
            return
        rows, reason = failed, f"continuous batching failed with {len(failed)} prompts"
    run.batching, run.batching_reason = "padded", reason
    logger.info("batching padded: %s", reason)
    yield from _padded_answers(run, loaded, rows, sampling, seed, batches, options)


def _padded_answers(
    run: _Run,
    loaded: LoadedModel,
    rows: Sequence[Row],
    sampling: dict[str, Any],
    seed: int,
    batches: BatchOptions,
    options: GenerationOptions,
) -> Iterator[Answer]:
    from amoeba.decoding.cache import why_not_fixed

    model = loaded.model
    size = min(batches.size or (GPU_BATCH if loaded.device.type == "cuda" else CPU_BATCH), len(rows))
    # a state of another kind than keys and values may take in what a mask hides
    cut = batches_of(rows, size, equal_lengths=why_not_fixed(model.config) is not None)
    longest, most = len(cut[0][0].ids), max(row.most for row in rows)
    steps = choose_steps(
        model,
        sampling,
        batch=size,
        prompt_tokens=longest,
        new_tokens=most,
        steps=most * len(cut),
        compile=options.compile,
    )
    run.steps, run.steps_reason, run.prepare_seconds = steps.kind, steps.reason, steps.seconds
    logger.info("steps %s: %s", steps.kind, steps.reason)
    run.parts.begin("prompts")
    yield from padded(model, cut, size, steps, seed)


_BEGIN = b'{"line": '


class Results:
    """path: None for `write`, line by line. model: what the results are of, in words."""

    def __init__(
        self, path: Path | None, prompts: Sequence[Prompt], model: str, write: Callable[[str], object] = print
    ) -> None:
        self.path, self.model, self._write = path, model, write
        done = set() if path is None else self._done({prompt.line: prompt for prompt in prompts})
        self.skipped = len(done)
        self.left = [prompt for prompt in prompts if prompt.line not in done]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a"):  # what cannot be written is known before a model is loaded
                pass

    def add(self, prompt: Prompt, facts: dict[str, Any]) -> None:
        record = {"line": prompt.line, "model": self.model, "prompt": prompt.as_json(), **facts}
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
            known = prompts.get(record.get("line", 0)) if isinstance(record, dict) else None
            if known is None or (record.get("prompt"), record.get("model")) != (known.as_json(), self.model):
                raise self._of_another_run(place)
            done.add(known.line)
        os.truncate(self.path, whole)  # a run may have been killed while it wrote one more
        return done

    def _of_another_run(self, place: str) -> ValueError:
        return bad_value(
            place,
            f"results of these prompts with {self.model}, to continue after them",
            "something else",
            "name another --out, or move the file away",
        )
