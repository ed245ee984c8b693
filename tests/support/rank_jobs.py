"""What tests have the processes of a group do: sent there by name, so it is in a module that they can import.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import quick_interpreter
from amoeba import ExpertWeights, Routing, experts, with_precision
from amoeba.parallel import Owners, RankLost, Ranks, ShardedExperts, shard_experts
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.processes import LocalRanks, first_processes
from amoeba.parallel.rank_zero import RankZero
from amoeba.parallel.transports import peers

E, H, I = 5, 16, 24
# what the jobs below need, and takes seconds in each process
PRELOAD = (
    "transformers.trainer",
    "peft",
    "amoeba.jobs.train.train",
    "amoeba.jobs.finetune.finetune",
    "amoeba.backends.triton",
)


def started(count: int) -> LocalRanks:
    """Processes that interpret kernels as quickly as this one does."""
    processes = LocalRanks(count, preload=PRELOAD)
    processes.run(quick_interpreter.install, [()] * count)
    return processes


def sharded_layer(
    count: int, deadline: float = 30.0, hidden: int = H, inner: int = I, biases: bool = False, **options: Any
) -> ShardedExperts:
    generator = torch.Generator().manual_seed(0)
    shapes = ((E, 2 * inner, hidden), (E, hidden, inner), (E, 2 * inner), (E, hidden))[: 4 if biases else 2]
    weights = ExpertWeights(*(torch.randn(*shape, generator=generator) / 4 for shape in shapes))
    return shard_experts(weights, Ranks(first_processes(count), deadline), **options)


def tokens(top_k: int = 2, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(1)
    expert_TK = torch.rand(7, E, generator=generator).argsort(1)[:, :top_k]
    return torch.randn(7, H, generator=generator).to(dtype), Routing(
        expert_TK, torch.rand(7, top_k, generator=generator)
    )


def disagree(rank: int, about: str) -> str:
    """What each rank says when rank 1 comes with something else."""
    x_TH, routing = tokens(top_k=3 if rank == 1 and about == "experts per token" else 2)
    x_TH.requires_grad_(not (rank == 1 and about == "gradients"))
    try:
        experts(x_TH, routing, sharded_layer(3))
    except ValueError as error:
        return str(error)
    return "nothing"


def wait_in_vain(rank: int, deadline: float) -> str:
    """Rank 1 does not call the layer."""
    if rank == 1:
        return "elsewhere"
    try:
        experts(*tokens(), sharded_layer(2, deadline))
    except RankLost as error:
        return str(error)
    return "nothing"


def lose_a_rank(rank: int) -> tuple[str, float]:
    """Rank 2 is killed between two calls."""
    layer, began = sharded_layer(3), time.monotonic()
    experts(*tokens(), layer)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        experts(*tokens(), layer)
    except RankLost as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


def sizes_of_messages(rank: int) -> list[tuple[str, int]]:
    """What was sent, and how many bytes, when the tokens of rank 0 all choose experts of rank 1."""
    layer = sharded_layer(2)
    sent: list[tuple[str, int]] = []
    exchange = layer.ranks.exchange
    layer.ranks.exchange = lambda rows, *rest: sent.append((rest[-1], rows.nbytes)) or exchange(rows, *rest)
    x_TH, _ = tokens()
    expert_TK = torch.tensor([[3, 4]]).expand(7, 2) if rank == 0 else torch.full((7, 2), -1)
    experts(x_TH, Routing(expert_TK, torch.ones(7, 2)), layer)
    return sent


def owners_of_one() -> ShardedExperts:
    local = ExpertWeights(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    return ShardedExperts(local, Owners.even(E, 1), Ranks())


def with_and_without_checkpointing(
    rank: int, count: int = 4, last: bool = False, precision: str = "bf16", **options: Any
) -> list[bool]:
    """Whether gradients have the same bits if forward, and so the exchange, is run again in backward. last: nothing
    behind the experts is saved, so that what is run again ends with what they save."""
    layer, (x_TH, routing) = replace(sharded_layer(count), **options), tokens()
    layer = replace(layer, local=with_precision(layer.local, precision))
    weight_TK, dy_TH = routing.weight_TK.requires_grad_(), torch.ones(7, H) * (rank + 1)
    wanted = [x_TH.requires_grad_(), weight_TK, *(t.requires_grad_() for t in layer.local.tensors() if t is not None)]

    def run(x_TH: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        y_TH = experts(x_TH * 2, Routing(routing.expert_TK, weight_TK), layer)
        return y_TH if last else y_TH.tanh()

    expected = torch.autograd.grad(run(x_TH, weight_TK), wanted, dy_TH)
    found = torch.autograd.grad(checkpoint(run, x_TH, weight_TK, use_reentrant=False), wanted, dy_TH)
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


def peers_as_collective(
    rank: int,
    count: int,
    steps: list[tuple[int, ...]],
    local_backend: str = "auto",
    by: str = "peers",
    biases: bool = False,
    **options: Any,
) -> tuple[list[bool], int]:
    """Whether output and gradients by `peers` have the bits of `collective`; and how often the hosts of the former
    talked. steps: tokens of each rank in each of them. by: another transport instead of `peers`."""
    layers = {name: sharded_layer(count, transport=name, biases=biases) for name in (by, "collective")}
    layers = {name: replace(layer, local_backend=local_backend) for name, layer in layers.items()}
    layers[by] = replace(layers[by], **options)
    equal, talked = [], 0
    for step, tokens_of in enumerate(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x_TH, dy_TH = (torch.randn(tokens_of[rank], H, generator=generator) for _ in range(2))
        expert_TK = torch.randint(-1, E + 1, (tokens_of[rank], 2), generator=generator)
        weight_TK = torch.rand(tokens_of[rank], 2, generator=generator)
        found = []
        for name, layer in layers.items():
            before = layer.ranks._exchanges
            wanted = [t.detach().requires_grad_() for t in (x_TH, weight_TK)]
            wanted += [t.requires_grad_() for t in layer.local.tensors() if t is not None]
            y_TH = experts(wanted[0], Routing(expert_TK, wanted[1]), layer)
            found.append([y_TH, *torch.autograd.grad(y_TH, wanted, dy_TH)])
            talked += (layer.ranks._exchanges - before) * (name == by)
        equal += [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    return equal, talked


def started_early(
    rank: int,
    count: int,
    steps: list[tuple[int, ...]],
    most_tokens: int,
    slow: int,
    biases: bool = False,
    by: str = "peers",
) -> tuple[list[bool], int]:
    """As `peers_as_collective`, where the scheduled backward sends dy itself and begins before that of others is there;
    and how often it did. slow: this rank comes late to each backward."""
    options = {"most_tokens": most_tokens, "biases": biases, "by": by}
    run = functools.partial(peers_as_collective, rank, count, steps, "tasks", **options)
    found, early = _counting_early_starts(run, 0.4 if rank == slow else 0.0)
    return found[0], early


def checkpointed_early(rank: int, last: bool) -> tuple[list[bool], int]:
    """`with_and_without_checkpointing` of two ranks whose scheduled backward sends dy itself, one of them late."""
    options = {"transport": "peers", "local_backend": "tasks", "most_tokens": 32}
    return _counting_early_starts(lambda: with_and_without_checkpointing(rank, 2, last, **options), 0.3 * rank)


def _counting_early_starts(run: Callable[[], Any], late_by: float) -> tuple[Any, int]:
    import amoeba.backends.tasks  # noqa: F401
    from amoeba.tasks.triton import arrivals

    taken, sleep, announced = [], threading.Event(), arrivals.announced

    def late(dy_RH: torch.Tensor) -> Any:
        sleep.wait(late_by)
        found = announced(dy_RH)
        taken.extend([] if found is None else [found])
        return found

    arrivals.announced = late
    try:
        return run(), len(taken)
    finally:
        arrivals.announced = announced


def rows_of_buffers(rank: int, gradients: bool, **options: int) -> tuple[int | None, int, int]:
    """By `peers`: rows that the buffers between the products get, slots with an expert of this rank, slots of all."""
    layer = replace(sharded_layer(2, transport="peers"), **options)
    generator = torch.Generator().manual_seed(rank)
    x_TH, weight_TK = torch.randn(300, H, generator=generator), torch.rand(300, 2, generator=generator)
    routing = Routing(torch.randint(0, 2, (300, 2), generator=generator) * 4, weight_TK)  # experts 0 and 4 of five
    exchange = peers.TRANSPORT.plan(layer, x_TH, routing, gradients)
    _, expert_RK, _ = exchange.dispatch(x_TH, weight_TK)
    return exchange.slots, int((expert_RK >= 0).sum()), expert_RK.numel()


def too_many_for_peers(rank: int, **most: int) -> str:
    """Both ranks come with more than was agreed on."""
    try:
        experts(*tokens(), replace(sharded_layer(2, transport="peers"), **most))
    except ValueError as error:
        return str(error)
    return "nothing"


def wait_for_peers_in_vain(rank: int) -> str:
    """Rank 1 comes once, and not again: what rank 0 says, whose kernel waited."""
    layer = replace(sharded_layer(2, transport="peers"), most_tokens=8)
    experts(*tokens(), layer)
    if rank == 1:
        return "elsewhere"
    layer.ranks.deadline = 0.5
    try:
        experts(*tokens(), layer)
    except RankLost as error:
        return str(error)
    return "nothing"


def run_job(
    rank: int, count: int, command: str, told: dict[str, Any], stop: tuple[int, int] | None = None, **options: Any
) -> tuple[Any, list[str]]:
    """A run over the first so many processes: its report, and what this rank's console was told.

    stop: SIGTERM reaches this rank after this step.
    """
    import tiny_runs
    from amoeba.jobs.settings import load_settings

    class Console(tiny_runs.Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            if stop == (rank, line["step"]):
                os.kill(os.getpid(), signal.SIGTERM)

    console = Console()
    rank_zero = RankZero(Ranks(first_processes(count), deadline=60.0))
    settings = load_settings(None, told, tiny_runs.KINDS[command])
    return tiny_runs.tiny_run(settings, console, rank_zero=rank_zero, **options), console.said


def resumed_job(*arguments: Any) -> Any:
    return run_job(*arguments, resume=True)


def see_folder(rank: int, count: int, folder: str) -> str:
    """What a rank says whose folder for the run may be another one than that of rank 0."""
    from amoeba.jobs.train import run_folder as module

    module._SECONDS_UNTIL_SEEN = 0.2
    try:
        with module.run_folder(folder, False, print, RankZero(Ranks(first_processes(count), deadline=60.0))):
            return "seen"
    except (ValueError, RankLost) as error:
        return str(error)


def fail_to_write(rank: int, told: dict[str, Any], whose: int = 1) -> str:
    """What each of two ranks says when the disk of one is full at the second checkpoint."""
    from amoeba.jobs.train import manifest

    save_tensors = manifest.save_tensors

    def fill_the_disk(path: Any, *about: Any) -> Any:
        if rank == whose and "checkpoint-8" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save_tensors(path, *about)

    manifest.save_tensors = fill_the_disk
    try:
        run_job(rank, 2, "train", told)
    except (ValueError, RankLost) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        manifest.save_tensors = save_tensors
    return "nothing"


def run_command(
    rank: int, count: int, words: list[str], variables: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """The command line in a process that a launcher started and whose group it made: exit code, stdout, stderr.

    variables: of the environment, besides the launcher's.
    """
    from typer.testing import CliRunner

    from amoeba.cli import app

    given = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)} | (variables or {})
    os.environ |= given
    try:
        result = CliRunner().invoke(app, words)
    finally:
        for name in given:
            del os.environ[name]
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def save_and_load(rank: int, family: str, folder: str) -> dict[str, torch.Tensor]:
    """A model saved by two ranks. What each of them reads back as its own, and what all have."""
    from pathlib import Path

    from amoeba.jobs.sharded_model import ShardedModel, load_share, shard_model
    from tiny_models import build

    ranks, model = Ranks(first_processes(2), deadline=60.0), build(family)
    shard_model(model, ranks)
    rank_zero, kept = RankZero(ranks), ShardedModel(RankMesh(ranks, ranks))
    kept.gather(model)
    with rank_zero.all_or_none("saving"):
        kept.save(model, Path(folder))
    with rank_zero.all_or_none("the index"):
        if rank == 0:
            kept.finish(Path(folder))
    loaded = load_share(folder, None, ranks, trains=True)
    assert {name for name, p in model.named_parameters()} == {name for name, p in loaded.named_parameters()}
    return {
        name: (tensor.detach() - found.detach()).abs().max() if tensor.numel() else torch.zeros(())
        for (name, tensor), (_, found) in zip(model.named_parameters(), loaded.named_parameters(), strict=True)
    }


def do_together(rank: int) -> list[Any]:
    """What three ranks find when one decides, one fails, and one has something else."""
    rank_zero = RankZero(Ranks(first_processes(3), deadline=30.0))
    found: list[Any] = [rank_zero.tell(lambda: {"rank": rank, "text": "é" * 3}), rank_zero.tell(lambda: None)]
    found.append(rank_zero.highest(rank * 5, "numbers"))
    found.append(rank_zero.add_up(torch.tensor([2**40 + rank]), "large integers").item())
    found.append([rank_zero.part(4), rank_zero.part(2)])

    def fail() -> None:
        if rank == 1:
            raise ValueError("it is wet")

    def all_do() -> None:
        with rank_zero.all_or_none("drying"):
            fail()

    for attempt in (all_do, lambda: rank_zero.check_same({"weather": rank == 2}), lambda: rank_zero.tell(decide_badly)):
        try:
            attempt()
        except (ValueError, RankLost) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def decide_badly() -> None:
    raise ValueError("no idea")
