"""Answers the prompts of a file on many machines: Ray Data spreads them, and each worker runs aMoEba's engine.

    pip install 'ray[data]' -e '.[serve]'
    python examples/ray_batch.py models/base prompts.txt answers --workers 2

Every prompt gets the text that `amoeba generate --prompts` writes for it with the same seed, on any number of workers.
`answers` becomes a folder of JSON lines: line, prompt, text, generated_tokens. With `--gpus 1` each worker has a GPU of
its own. In a Ray cluster, run it on the head node; the model's folder has to be there on every machine.
"""

from __future__ import annotations

import argparse
import queue
from pathlib import Path
from typing import Any

import ray

from amoeba.data.sources import read_prompts
from amoeba.decoding.engine import End
from amoeba.jobs.generate.options import GenerationOptions
from amoeba.serve.served_model import open_model


class Worker:
    """Loads the model once; calls are answered by continuous batching, in any order, and returned in theirs."""

    def __init__(self, model: str, options: GenerationOptions, slots: int | None) -> None:
        self.served, self.options = open_model(model, options, slots=slots), options

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        served, told = self.served, queue.SimpleQueue[tuple[int, Any]]()
        prompts = [str(prompt) for prompt in batch["prompt"]]
        for place, (line, prompt) in enumerate(zip(batch["line"], prompts, strict=True)):
            ids = served.text_ids(served.names[0], prompt)
            served.engine.submit(
                served.request(
                    ids,
                    served.most(ids, None),
                    lambda each, place=place: told.put((place, each)),
                    sampling=served.sampling(),
                    seed=served.seed(None) if self.options.seed is None else self.options.seed + int(line),
                )
            )
        tokens: list[list[int]] = [[] for _ in prompts]
        left = len(prompts)
        while left:
            place, each = told.get()
            if not isinstance(each, End):
                tokens[place].append(each.id)
                continue
            left -= 1
            if each.error:
                raise RuntimeError(each.error)
        tokenizer = served.loaded.tokenizer
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
        return {**batch, "text": texts, "generated_tokens": [len(ids) for ids in tokens]}


def answer(
    model: str,
    prompts: Path,
    *,
    options: GenerationOptions,
    workers: int = 2,
    gpus: float = 0,
    batch: int = 64,
    slots: int | None = None,
) -> Any:
    """A dataset of Ray with the answers, which are computed when it is written or iterated over."""
    rows = [{"line": each.line, "prompt": each.content} for each in read_prompts(prompts, chat=False)]
    return ray.data.from_items(rows, override_num_blocks=min(len(rows), 4 * workers)).map_batches(
        Worker,
        fn_constructor_args=(model, options, slots),
        batch_size=batch,
        num_gpus=gpus,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="One per line, or JSONL with `prompt`.")
    parser.add_argument("out", type=Path, help="A folder for JSON lines.")
    parser.add_argument("--workers", type=int, default=2, help="Processes that load the model.")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker.")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = GenerationOptions(given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    found = answer(given.model, given.prompts, options=options, workers=given.workers, gpus=given.gpus)
    found.write_json(str(given.out.resolve()))


if __name__ == "__main__":
    main()
