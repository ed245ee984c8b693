"""Plain torchrun, without --experts ranks: each rank has the whole model and a part of each batch, and the run is that
of one process with the whole batch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_jobs
from amoeba.jobs.train.run_folder import checkpoints
from amoeba.parallel.processes import LocalRanks
from called import call
from same_runs import check_same_run
from selection import quick
from tiny_models import build
from tiny_runs import KEPT, Quiet, tiny_run, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
CHANGED = {"batch_size": 3, "log_every": 1}


def alone(command: str, folder: Path, inputs: Path, **changes: Any) -> Path:
    tiny_run(tiny_settings(command, folder, inputs, **CHANGED | changes), Quiet())
    return folder


def told(command: str, folder: Path, inputs: Path, **changes: Any) -> dict[str, Any]:
    return tiny_settings(command, folder, inputs, **CHANGED | changes).as_dict()


@quick(lambda command, count: (command, count) == ("finetune", 2))  # train: by FSDP
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_ranks_that_share_each_batch_train_as_one_process(processes, inputs, tmp_path, command, count):
    """Three rows a batch: of two ranks one has more than the other, of four one has none."""
    changes = {"steps": 5, "save_every": 5, "eval_every": 5}
    given = told(command, tmp_path / "run", inputs, **changes)
    found = processes.run(rank_jobs.run_job, [(rank, count, command, given) for rank in range(count)])
    reports, said = zip(*found, strict=True)
    assert len({json.dumps([report.steps, report.final_loss]) for report in reports}) == 1
    assert f"{count} ranks, each with the whole model, share each batch and add up their gradients" in said[0]
    expected = alone(command, tmp_path / "alone", inputs, **changes)
    check_same_run(tmp_path / "run", expected, KEPT[command])
    ours, theirs = (folder / "checkpoints/checkpoint-5" for folder in (tmp_path / "run", expected))
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}  # one rank writes


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_run_resumes_on_two_ranks_four_shared_experts_and_one_process(
    processes: LocalRanks, inputs: Path, tmp_path: Path, command: str
) -> None:
    run = tmp_path / "run"
    given = told(command, run, inputs, experts="resident")
    for count, stop, job in ((2, (1, 3), rank_jobs.run_job), (4, (2, 5), rank_jobs.resumed_job)):
        found = processes.run(job, [(rank, count, command, given, stop) for rank in range(count)])
        assert all(report.interrupted and report.steps == stop[1] for report, _ in found)
        assert any(f"torchrun --nproc-per-node {count} -m amoeba {command} --resume" in text for text in found[0][1])
    sharded = told(command, run, inputs, experts="ranks")
    found = processes.run(rank_jobs.resumed_job, [(rank, 2, command, sharded, (0, 7)) for rank in range(2)])
    assert all(report.steps == 7 for report, _ in found)
    found = processes.run(rank_jobs.resumed_job, [(rank, 2, command, given, (0, 9)) for rank in range(2)])
    assert all(report.steps == 9 for report, _ in found)
    tiny_run(tiny_settings(command, run, inputs, **CHANGED, experts="resident"), Quiet(), resume=True)
    check_same_run(run, alone(command, tmp_path / "alone", inputs, experts="resident"), KEPT[command])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("train", {"balance": "none", "z_loss_coefficient": 0.01}),
        ("train", {"gradient_checkpointing": True}),
        ("train", {"accumulation": 3, "batch_size": 1}),
        ("train", {"precision": "fp8-ste"}),
        ("train", {"dtype": "bfloat16"}),
        ("finetune", {"experts": "cpu-bf16", "dtype": "bfloat16"}),
        ("finetune", {"experts": "cpu-int8"}),
        ("finetune", {"experts": "mxfp4-weights"}),
        ("finetune", {"targets": ["all-linear"], "balance": "aux"}),
    ],
    ids=str,
)
def test_every_kind_of_run_is_that_of_one_process(processes, inputs, tmp_path, command, changes):
    changes = {"steps": 4, "save_every": 4, "eval_every": 4} | changes
    given = told(command, tmp_path / "run", inputs, **changes)
    processes.run(rank_jobs.run_job, [(rank, 2, command, given) for rank in range(2)])
    expected = alone(command, tmp_path / "alone", inputs, **changes)
    if changes.get("dtype") == "bfloat16":
        sides = [losses(folder) for folder in (tmp_path / "run", expected)]
        torch.testing.assert_close(*sides, rtol=5e-3, atol=0)
    else:
        # rows are rounded to int8, and one that is next to a middle moves where sums of ranks differ in their last bit
        atol = 1e-4 if changes.get("experts") == "cpu-int8" else 1e-5
        check_same_run(tmp_path / "run", expected, KEPT[command], atol)


def losses(run: Path) -> torch.Tensor:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [loss for line in lines if line["kind"] == "train" for loss in line["step_losses"]]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


@pytest.mark.thorough
def test_selection_biases_move_as_in_one_process(processes: LocalRanks, inputs: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    vocabulary = json.loads((inputs / "base/config.json").read_text())["vocab_size"]
    build("glm4_moe", vocab_size=vocabulary).save_pretrained(base)
    for path in (inputs / "base").glob("tokenizer*"):
        shutil.copy(path, base)
    changes = {"model": str(base), "balance": "bias", "steps": 4, "eval_every": 4}
    given = told("train", tmp_path / "run", inputs, **changes)
    processes.run(rank_jobs.run_job, [(rank, 2, "train", given) for rank in range(2)])
    check_same_run(tmp_path / "run", alone("train", tmp_path / "alone", inputs, **changes), "model")


class TestRefusals:
    def refused(self, processes: LocalRanks, words: list[str]) -> str:
        found = processes.run(rank_jobs.run_command, [(rank, 4, words) for rank in range(4)])
        assert [code for code, *_ in found] == [2] * 4
        assert all(out == err == "" for _, out, err in found[1:])
        return found[0][2]

    def test_generate_is_told_how_to_share_the_experts(self, processes: LocalRanks, inputs: Path) -> None:
        said = self.refused(processes, ["generate", str(inputs / "base"), "In", "--max-new-tokens", "2"])
        assert "generate: expected one process, or --experts ranks; got 4 processes" in said
        assert "Start it without torchrun, or add --experts ranks." in said

    def test_streamed_experts_are_for_one_process(self, processes: LocalRanks, inputs: Path, tmp_path: Path) -> None:
        words = ["finetune", str(inputs / "base"), "--data", str(inputs / "finetune.jsonl"), "--ram", "1GiB"]
        words += ["--vram", "1GiB"] if torch.cuda.is_available() else []
        said = self.refused(processes, [*words, "--out", str(tmp_path / "run")])
        assert "streamed experts: expected one process; got 4" in said
        assert not (tmp_path / "run").exists()

    def test_scales_over_all_tokens_are_for_one_process(self, processes, inputs, tmp_path):
        words = [
            "train",
            "--model",
            str(inputs / "base"),
            "--data",
            str(inputs / "train.jsonl"),
            "--precision",
            "fp8-all",
        ]
        said = self.refused(processes, [*words, "--out", str(tmp_path / "run"), "--sequence-length", "32"])
        assert "precision: expected a recipe whose scales depend on single rows" in said
        assert not (tmp_path / "run").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_torchrun_checkpoints_resumes_and_has_the_losses_of_one_process(inputs, tmp_path, command):
    model = ["--model", str(inputs / "base")] if command == "train" else [str(inputs / "base"), "--lora-rank", "4"]
    words = [command, *model, "--data", str(inputs / f"{command}.jsonl"), "--steps", "6", "--save-every", "2"]
    words += [
        "--eval-every",
        "3",
        "--log-every",
        "1",
        "--batch-size",
        "3",
        "--sequence-length",
        "32",
        "--dtype",
        "float32",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "amoeba"]
    done = subprocess.run(
        [*launch, *words, "--out", str(tmp_path / "run"), "--json"],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 6
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-6"]
    shutil.rmtree(tmp_path / "run/checkpoints/checkpoint-6")
    shutil.rmtree(tmp_path / "run" / KEPT[command])
    done = subprocess.run(
        [*launch, command, "--resume", str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    call(*words, "--out", tmp_path / "alone")
    check_same_run(tmp_path / "run", tmp_path / "alone", KEPT[command])
