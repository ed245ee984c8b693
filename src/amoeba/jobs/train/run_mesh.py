"""How the ranks of a run share its model: by its settings or, in a resumed run, as its present ranks allow."""

from __future__ import annotations

from pathlib import Path

import torch

from amoeba.core.errors import bad_value
from amoeba.jobs.settings import RunSettings
from amoeba.jobs.train.resume import settings_of_run
from amoeba.jobs.train.run_folder import Console
from amoeba.parallel.mesh import RankMesh, check_expert_ranks, make_mesh
from amoeba.parallel.rank_zero import RankZero
from amoeba.precision.recipes import OF_ALL_TOKENS, UNCHANGED


def check_ranks(settings: RunSettings, resume: bool, rank_zero: RankZero) -> None:
    """ValueError before there is a folder, where a run asks for what its ranks cannot do."""
    if rank_zero.ranks is not None and settings.expert_ranks is not None and not resume:
        check_expert_ranks(settings.expert_ranks, rank_zero.count)
    if rank_zero.count > 1 and getattr(settings, "precision", UNCHANGED) == OF_ALL_TOKENS:
        expected = "a recipe whose scales depend on single rows: each rank has only part of the batch"
        raise bad_value("precision", expected, OF_ALL_TOKENS, "use fp8, or start it without torchrun")


def shared_batches(rank_zero: RankZero) -> str:
    """Told of a run whose ranks have the whole model each."""
    return f"{rank_zero.count} ranks, each with the whole model, share each batch and add up their gradients"


def mesh_of(
    settings: RunSettings, folder: Path, console: Console, resume: bool, rank_zero: RankZero
) -> RankMesh | None:
    """None where each rank has the whole model."""
    ranks = rank_zero.ranks
    if ranks is None or settings.experts != "ranks":
        return None
    own = settings.expert_ranks
    if resume and own is not None and ranks.count % own and settings_of_run(folder).get("expert_ranks") == own:
        console.say(f"the run used groups of {own} ranks, which does not divide {ranks.count}; now using all ranks")
        own = None
    return make_mesh(ranks, own, settings.dense, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
