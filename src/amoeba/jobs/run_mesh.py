"""How the ranks of a run share its model, as its settings say; of a resumed run, as its present ranks allow."""

from __future__ import annotations

from pathlib import Path

import torch

from amoeba.jobs.resume import settings_of_run
from amoeba.jobs.run_folder import Console
from amoeba.jobs.settings import RunSettings
from amoeba.parallel.mesh import RankMesh, check_expert_ranks, make_mesh
from amoeba.parallel.together import Together


def check_ranks(settings: RunSettings, resume: bool, together: Together) -> None:
    """ValueError before there is a folder, where a new run asks for what its ranks cannot be divided into."""
    if together.ranks is not None and settings.expert_ranks is not None and not resume:
        check_expert_ranks(settings.expert_ranks, together.count)


def mesh_of(settings: RunSettings, folder: Path, console: Console, resume: bool, together: Together) -> RankMesh | None:
    """None where the experts are not over ranks."""
    ranks = together.ranks
    if ranks is None:
        return None
    own = settings.expert_ranks
    if resume and own is not None and ranks.count % own and settings_of_run(folder).get("expert_ranks") == own:
        console.say(f"the run had its experts over {own} ranks, which do not divide the {ranks.count} of now: over all")
        own = None
    return make_mesh(ranks, own, settings.dense, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
