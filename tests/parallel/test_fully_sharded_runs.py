"""`amoeba train` and `finetune` over groups of ranks, with FSDP2 between them: the numbers of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import rank_jobs
from amoeba.jobs.settings import FinetuneSettings, TrainSettings
from amoeba.jobs.train.resume import settings_of
from amoeba.jobs.train.run_folder import checkpoints
from amoeba.parallel import Owners, Ranks
from amoeba.parallel.mesh import RankMesh, make_mesh
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.rank_zero import RankZero
from amoeba.parallel.shards import rows_here
from called import call
from same_runs import check_same_run
from tiny_models import build
from tiny_runs import KEPT, Quiet, tiny_run, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore")
CHANGED = {"batch_size": 3, "log_every": 1}
GRID = {"experts": "ranks", "expert_ranks": 2, "dense": "fsdp"}


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one process that has all experts, never interrupted; each made when it is first asked for."""

    class Runs(dict):
        def __missing__(self, command: str) -> Path:
            self[command] = tmp_path_factory.mktemp("alone") / command
            tiny_run(tiny_settings(command, self[command], inputs, **CHANGED), Quiet())
            return self[command]

    return Runs()


def told(command: str, folder: Path, inputs: Path, **changes: Any) -> dict[str, Any]:
    return tiny_settings(command, folder, inputs, **CHANGED | GRID | changes).as_dict()


def test_the_command_over_two_groups_of_two_ranks_trains_as_one_process(processes, inputs, tmp_path):
    """Three rows a batch, of which a rank has none; six experts, of which each rank keeps one or two."""
    few = CHANGED | {"steps": 4, "eval_every": 4}
    settings = tiny_settings("train", tmp_path / "run", inputs, **few)
    tiny_run(tiny_settings("train", tmp_path / "alone", inputs, **few), Quiet())
    words = ["train", "--experts", "ranks", "--expert-ranks", "2", "--dense", "fsdp", "--json"]
    for name in ("model", "data", "out", "steps", "batch_size", "log_every", "eval_every", "save_every",
                 "learning_rate", "sequence_length"):  # fmt: skip
        words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    config = tmp_path / "more.yaml"
    config.write_text(f"warmup_steps: {settings.warmup_steps}\nheld_out: {settings.held_out}\n")
    words += ["--config", str(config)]
    found = processes.run(rank_jobs.run_command, [(rank, 4, words) for rank in range(4)])
    assert [code for code, *_ in found] == [0] * 4
    assert json.loads(found[0][1].splitlines()[-1])["steps"] == settings.steps
    assert (
        "in 2 groups of 2 ranks, which share each batch; in a group rows are exchanged by collective, between groups "
        "FSDP2 shards the experts; all other parameters: sharded by FSDP2 over all ranks"
    ) in found[0][2].replace("\n", " ")
    assert all(out == err == "" for _, out, err in found[1:])  # one of them speaks
    check_same_run(tmp_path / "run", tmp_path / "alone", "model")
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]  # and not FSDP2's name for it


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_run_resumes_on_two_by_two_ranks_then_two_then_one(
    processes: LocalRanks, alone: dict[str, Path], inputs: Path, tmp_path: Path, command: str
) -> None:
    given = told(command, tmp_path / "run", inputs)
    for count, stop in ((4, (3, 3)), (2, (1, 6))):  # a rank other than the first is asked to stop
        options = [(rank, count, command, given, stop) for rank in range(count)]
        found = processes.run(rank_jobs.run_job if count == 4 else rank_jobs.resumed_job, options)
        assert all(report.interrupted and report.steps == stop[1] for report, _ in found)
        parts = sorted(path.name for path in checkpoints(tmp_path / "run")[-1].glob("optimizer-*"))
        assert parts == [f"optimizer-0000{rank}-of-0000{count}.safetensors" for rank in range(count)]
    console = Quiet()
    settings = tiny_settings(command, tmp_path / "run", inputs, **CHANGED | GRID)
    tiny_run(settings, console, resume=True, rank_zero=RankZero(Ranks()))
    assert "the run used groups of 2 ranks, which does not divide 1; now using all ranks" in console.said
    check_same_run(tmp_path / "run", alone[command], KEPT[command])


@pytest.mark.thorough
def test_a_run_of_one_process_goes_on_over_two_by_two_ranks(processes, alone, inputs, tmp_path):
    run = shutil.copytree(alone["train"], tmp_path / "run")
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-12")
    processes.run(rank_jobs.resumed_job, [(rank, 4, "train", told("train", run, inputs)) for rank in range(4)])
    check_same_run(run, alone["train"], "model")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (4, {"expert_ranks": 1}),
        (4, {"expert_ranks": 2, "dense": "ddp"}),
        (4, {"expert_ranks": None}),
        (2, {"expert_ranks": 2, "gradient_checkpointing": True}),
        (4, {"gradient_checkpointing": True, "optimizer_states": "bfloat16"}),
    ],
    ids=["fsdp alone", "ddp beside", "one group", "one group, recomputed", "recomputed"],
)
def test_other_ways_to_share_a_model_train_as_one_process(processes, alone, inputs, tmp_path, count, changes):
    given = told("train", tmp_path / "run", inputs, **changes)
    processes.run(rank_jobs.run_job, [(rank, count, "train", given) for rank in range(count)])
    check_same_run(tmp_path / "run", alone["train"], "model")


@pytest.mark.thorough
def test_experts_of_one_tensor_on_disk_are_joined_over_both_dimensions(processes, inputs, tmp_path):
    """gpt-oss: transposed, in turns, with biases, which do not decay; four steps, and the model that came of them."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    vocabulary = json.loads((inputs / "base/config.json").read_text())["vocab_size"]
    build("gpt_oss", vocab_size=vocabulary).save_pretrained(base)
    for path in (inputs / "base").glob("tokenizer*"):
        shutil.copy(path, base)
    changes = {"model": str(base), "steps": 4, "eval_every": 4}
    tiny_run(tiny_settings("train", tmp_path / "alone", inputs, **CHANGED | changes), Quiet())
    given = told("train", tmp_path / "run", inputs, **changes)
    processes.run(rank_jobs.run_job, [(rank, 4, "train", given) for rank in range(4)])
    check_same_run(tmp_path / "run", tmp_path / "alone", "model")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.thorough), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_one_rank_computes_the_same_with_its_parameters_in_shards(inputs, tmp_path, monkeypatch, device):
    """Shards of one are whole, but gathered, freed, reduced and stepped as with many: on a GPU in bf16, by NCCL."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ranks = Ranks()
        all_of_it = DeviceMesh.from_group(ranks.group, device)
        for name, meshes in (("copies", ()), ("shards", (all_of_it, all_of_it))):
            mesh = RankMesh(ranks, ranks, *meshes)
            monkeypatch.setattr("amoeba.jobs.train.run.make_mesh", lambda *_, mesh=mesh: mesh)
            settings = tiny_settings("train", tmp_path / name, inputs, **CHANGED, experts="ranks")
            tiny_run(settings, Quiet(), rank_zero=RankZero(ranks))
    finally:
        torch.distributed.destroy_process_group()
    check_same_run(tmp_path / "shards", tmp_path / "copies", "model")


def some_ranks(count: int) -> Ranks:
    found = object.__new__(Ranks)
    found.rank, found.count = 0, count
    return found


@pytest.mark.parametrize("wrong", [3, 8, 0, -2])
def test_a_number_that_does_not_divide_the_ranks_is_refused(wrong: int) -> None:
    expected = rf"--expert-ranks: expected .* the 4 ranks \(1, 2, 4\); got {wrong}\. .*leave it out"
    with pytest.raises(ValueError, match=expected):
        make_mesh(some_ranks(4), wrong, "ddp", torch.device("cpu"))


def test_a_run_that_cannot_be_divided_leaves_no_folder(inputs: Path, tmp_path: Path) -> None:
    settings = tiny_settings("train", tmp_path / "run", inputs, **GRID | {"expert_ranks": 3})
    ranks: Any = some_ranks(4)
    ranks.gather_texts = lambda text, what: [text] * 4  # they have the same settings
    with pytest.raises(ValueError, match="a number that divides the 4 ranks"):
        tiny_run(settings, Quiet(), rank_zero=RankZero(ranks))
    assert not (tmp_path / "run").exists()


def test_a_run_over_groups_may_go_on_with_resident_experts(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(told("train", tmp_path, inputs)))
    found = settings_of(TrainSettings, str(tmp_path), None, {"experts": "resident"})
    assert (found.expert_ranks, found.dense) == (None, "ddp")
    assert settings_of(TrainSettings, str(tmp_path), None, {}).expert_ranks == 2


def test_ranks_that_share_a_gpu_are_refused_before_anything_waits() -> None:
    ranks = some_ranks(4)
    ranks._backends, ranks._names = {"cpu": "gloo", "cuda": "gloo"}, [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"--dense fsdp: expected a GPU for each rank.* got ranks that share one"):
        make_mesh(ranks, None, "fsdp", torch.device("cuda"))


@pytest.mark.parametrize(("kind", "given"), [(TrainSettings, {}), (FinetuneSettings, {"model": "m"})])
def test_what_is_for_experts_over_ranks_wants_them_there(kind: Any, given: dict[str, Any]) -> None:
    for more, option in (({"expert_ranks": 2}, "--expert-ranks 2"), ({"dense": "fsdp"}, "--dense fsdp")):
        with pytest.raises(ValueError, match=f"{option}: expected --experts ranks"):
            kind(**given, **more)
    with pytest.raises(ValueError, match="dense: expected one of ddp, fsdp; got 'zero'"):
        kind(**given, experts="ranks", dense="zero")
    with pytest.raises(ValueError, match="expert_ranks: expected an integer of at least 1; got 0"):
        kind(**given, experts="ranks", expert_ranks=0)


def test_the_command_refuses_them_for_resident_experts(inputs: Path, tmp_path: Path) -> None:
    words = ["train", "--model", str(inputs / "base"), "--out", str(tmp_path / "run"), "--expert-ranks", "2"]
    result = call(*words, code=2)
    assert not (tmp_path / "run").exists()
    assert "--expert-ranks 2: expected --experts ranks" in result.stderr


@pytest.mark.parametrize(("experts", "count", "own"), [(10, 4, 2), (6, 4, 1), (5, 6, 3), (2, 8, 4), (7, 3, 3)])
def test_each_expert_is_kept_by_one_rank(experts: int, count: int, own: int) -> None:
    mesh, owners = RankMesh(some_ranks(count), some_ranks(own)), Owners.even(experts, own)
    kept = [mesh.experts_of(owners, rank) for rank in range(count)]
    assert sorted(expert for each in kept for expert in each) == list(range(experts))
    for rank, mine in enumerate(kept):
        assert set(mine) <= set(owners.experts_of(rank % own))


@pytest.mark.parametrize(("rows", "ranks"), [(10, 4), (3, 4), (0, 2), (8, 1)])
def test_rows_here_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    class Shard:
        shape = (rows, 2)

        def to_local(self) -> None: ...

    parts = list(torch.arange(rows).chunk(ranks))
    for rank in range(ranks):
        Shard.device_mesh = type("", (), {"size": lambda _: ranks, "get_local_rank": lambda _, rank=rank: rank})()
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(rows_here(Shard())) == expected
