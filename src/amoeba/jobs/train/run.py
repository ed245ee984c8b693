"""A run of `train` or `finetune` as it was asked for, and what both do around their loops.

run = Run("amoeba train", settings, console, resume=True)
with run.in_folder():
    ended = run.finished("model", TrainReport, "model")
    earlier = run.earlier("model")
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.jobs.same_on_ranks import check_same_job
from amoeba.jobs.settings import RunSettings
from amoeba.jobs.train.manifest import MANIFEST, damages, with_digest
from amoeba.jobs.train.resume import (
    Earlier,
    Report,
    check_model_config,
    check_settings,
    check_whole,
    chosen,
    final_line,
    read_record,
    settings_of_run,
)
from amoeba.jobs.train.run_folder import Console, checkpoints, remove_unfinished, run_folder
from amoeba.parallel.mesh import RankMesh, check_expert_ranks, make_mesh
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.precision.recipes import OF_ALL_TOKENS, UNCHANGED
from amoeba.system.fast_imports import COMPILER, importing
from amoeba.system.files import write_whole
from amoeba.system.machine import commit, machine, versions


@dataclass(frozen=True)
class Run:
    """resume: go on with the run in the folder settings.out, from its last checkpoint or `start_from`.
    rank_zero: the ranks that share each batch, and with experts "ranks" the experts, too; each has the same run, and
    gets the same report."""

    command: str
    settings: RunSettings
    console: Console
    resume: bool = False
    start_from: str | None = None
    trust_remote_code: bool = False
    rank_zero: RankZero = ALONE

    @property
    def folder(self) -> Path:
        return Path(self.settings.out)

    def check_same(self) -> None:
        told = {"--resume": self.resume, "--from": self.start_from, "--trust-remote-code": self.trust_remote_code}
        check_same_job(self.rank_zero, self.command, self.settings, told, model=self.settings.model)

    def importing_compiler(self) -> AbstractContextManager[None]:
        """For the time in which weights are read: torch's compiler, where the run will use it unless it is tiny."""
        compiles = torch.cuda.is_available() and self.rank_zero.count == 1 and not self.settings.exact
        return importing(COMPILER if compiles and self.settings.compile != "off" else ())

    @contextmanager
    def in_folder(self) -> Iterator[None]:
        from transformers.utils import logging as transformers_logging

        settings, ranks = self.settings, self.rank_zero
        if ranks.ranks is not None and settings.expert_ranks is not None and not self.resume:
            check_expert_ranks(settings.expert_ranks, ranks.count)
        if ranks.count > 1 and getattr(settings, "precision", UNCHANGED) == OF_ALL_TOKENS:
            expected = "a recipe whose scales depend on single rows: each rank has only part of the batch"
            raise bad_value("precision", expected, OF_ALL_TOKENS, "use fp8, or start it without torchrun")
        with run_folder(settings.out, self.resume, self.console.say, ranks):
            transformers_logging.disable_progress_bar()  # the run has one of its own
            yield

    def mesh(self) -> RankMesh | None:
        """How the ranks share the model: by the settings or, in a resumed run, as its present ranks allow. None where
        each rank has the whole model."""
        ranks, own = self.rank_zero.ranks, self.settings.expert_ranks
        if ranks is None or self.settings.experts != "ranks":
            return None
        unfit = self.resume and own is not None and ranks.count % own != 0
        if unfit and settings_of_run(self.folder).get("expert_ranks") == own:
            said = f"the run used groups of {own} ranks, which does not divide {ranks.count}; now using all ranks"
            self.console.say(said)
            own = None
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return make_mesh(ranks, own, self.settings.dense, device)

    def finished(self, kept: str, kind: type[Report], field: str) -> Report | None:
        if not self.resume or self.start_from:
            return None
        result = self.folder / kept
        check_settings(self.settings, read_record(self.folder), self.folder, kept, self.command)
        line, wanted = final_line(self.folder), {entry.name for entry in fields(kind)}
        if line is None or not wanted <= line.keys() or not result.is_dir():
            return None
        if (result / MANIFEST).is_file() and (trouble := damages(result)):
            remedy = "if you changed them yourself, there is nothing to resume; otherwise move the folder away and "
            remedy += "resume again: the files are then written again from the last checkpoint"
            raise bad_value(str(result), "the files of the finished run, unchanged", "; ".join(trouble), remedy)
        return kind(**({name: line[name] for name in wanted} | {"folder": str(self.folder), field: str(result)}))

    def earlier(self, kept: str) -> Earlier | None:
        """None for a run that begins."""
        if not self.resume:
            if self.start_from:
                remedy = "name the run folder: --resume RUN --from CHECKPOINT"
                raise bad_value("--from", "--resume as well", "none", remedy)
            return None
        folder, ranks, record = self.folder, self.rank_zero, read_record(self.folder)
        check_settings(self.settings, record, folder, kept, self.command)
        if missing := [name for name in ("model_config", "began_with") if name not in record]:
            got = f"one without {' and '.join(missing)}"
            remedy = f"start a new run with another --out; the checkpoints in {folder / 'checkpoints'} are unchanged"
            raise bad_value(str(folder / "config.json"), "the record of a run", got, remedy)
        with ranks.all_or_none("what was left half-written"):
            if ranks.here:
                remove_unfinished(folder, kept)
        found = checkpoints(folder)
        last = chosen(found, self.start_from, folder) if self.start_from else (found[-1] if found else None)
        if last is not None:
            with ranks.all_or_none("looking whether the checkpoint is whole"):
                if ranks.here:
                    check_whole(last, found, folder, self.command)
        return Earlier(folder, self.command, last, record["model_config"], record["began_with"])

    def describe(self, model: Any, earlier: Earlier | None, content: dict[str, Any], precision: Any = None) -> None:
        """content: what it begins with. precision: of the experts, see `amoeba.jobs.train.train`."""
        if self.settings.experts != "ranks" and self.rank_zero.count > 1:
            ranks = f"{self.rank_zero.count} ranks, each with the whole model"
            self.console.say(f"{ranks}, share each batch and add up their gradients")
        if earlier:
            check_model_config(earlier, model.config)
        with self.rank_zero.all_or_none("the description of the run"):
            if self.rank_zero.here:
                began = {"began_with": earlier.began_with if earlier else content}
                config = self.settings.as_dict() | {"model_config": model.config.to_dict()} | began
                environment = {"machine": machine(), "versions": versions(), "commit": commit()}
                environment |= {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
                environment |= {} if precision is None else {"experts": precision}
                for name, told in {"config": with_digest(config), "environment": environment}.items():
                    write_whole(self.folder / f"{name}.json", json.dumps(told, indent=1, default=str) + "\n")
