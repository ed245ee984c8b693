"""What became of the prompts of a file, one JSON object per line, written as each is done: a later run goes on there.

results = Results(Path("answers.jsonl"), prompts, model="models/base")     # reads what is done already
results.left                                                              # the prompts that are not
results.add(prompt, text, ...)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value
from amoeba.data.prompts import Prompt
from amoeba.data.sources import parse_json, read_text

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
            f"results of these prompts with {self.model}, to go on after them",
            "something else",
            "name another --out, or move the file away",
        )
