"""What a run saves of its model: in each checkpoint, and at the end in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from amoeba.integrations.model_folder import MODEL_FOLDER
from amoeba.jobs.train.manifest import saves_fast


class Artifact(Protocol):
    """In the folder `name` of the run at its end.

    Over ranks each calls all of these: `gather` first, which may send, then `save`, in which nothing is sent and each
    writes its part, then the first rank `finish`.
    """

    name: str

    def gather(self, model: Any) -> None: ...

    def save(self, model: Any, folder: Path) -> None: ...

    def finish(self, folder: Path) -> None: ...

    def load(self, model: Any, folder: Path) -> None: ...


class WholeModel:
    name = MODEL_FOLDER

    def __init__(self, first: bool = True) -> None:
        """first: whether this is the rank that writes."""
        self._first = first

    def gather(self, model: Any) -> None:
        """Nothing: the model is all here."""

    def save(self, model: Any, folder: Path) -> None:
        if self._first:
            with saves_fast():
                model.save_pretrained(folder)

    def finish(self, folder: Path) -> None:
        """Nothing: the folder is whole."""

    def load(self, model: Any, folder: Path) -> None:
        """Through from_pretrained: on disk experts lie one by one, and only it puts them together again.

        (Trainer's own way reads the file as it is, finds no stacked experts and leaves them as initialised.)
        """
        stored = type(model).from_pretrained(folder, dtype=model.dtype, trust_remote_code=False)
        model.load_state_dict(stored.state_dict())
