"""A model of transformers with its experts over ranks trains as it does in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import amoeba
import rank_jobs
import rank_training
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.jobs.settings import TrainSettings
from amoeba.jobs.sharded_model import shard_model
from amoeba.jobs.train.train import run_precision
from amoeba.parallel import Ranks
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.rank_zero import RankZero
from amoeba.precision.recipes import Fp8Experts
from same_runs import lines
from selection import quick
from tiny_models import EXPERTS, build
from tiny_runs import Quiet, make_inputs, tiny_run, tiny_settings


@pytest.mark.thorough  # in every run: whole runs of the commands, and a model under FSDP
@pytest.mark.parametrize("count", [2, 4])
def test_twenty_steps_have_the_losses_and_norms_of_one_process(processes, count):
    ((alone, expected),) = processes.run(rank_training.train_a_model, [(0, 1, 20)])
    (first, shared), *others = processes.run(rank_training.train_a_model, [(rank, count, 20) for rank in range(count)])
    for history, parameters in others:  # what all have does not drift apart
        assert history == first
        assert all(torch.equal(parameters[name], shared[name]) for name in shared)
    assert set(shared) == set(expected)
    assert alone[-1][0] < alone[0][0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=1e-5, atol=0)


def test_each_rank_replays_the_experts_of_its_own_tokens(processes: LocalRanks) -> None:
    ((loss, gradients),) = processes.run(rank_training.replayed, [(0, 1)])
    for found, shared in processes.run(rank_training.replayed, [(rank, 2) for rank in range(2)]):
        assert found == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-7)


@quick(lambda family: family == "qwen3_moe")
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "nemotron_h", "olmoe"]
)
def test_a_placed_model_under_fsdp_trains_as_in_one_process(processes: LocalRanks, family: str) -> None:
    """FSDP2 puts other tensors in the place of the experts' parameters in each pass, and hooks their output."""
    ((alone, _),) = processes.run(rank_training.train_a_model, [(0, 1, 5, family)])
    for history in processes.run(rank_training.train_fully_sharded, [(rank, 5, family) for rank in range(4)]):
        torch.testing.assert_close(torch.tensor(history), torch.tensor(alone), rtol=1e-5, atol=0)


def test_fsdp_over_two_by_two_ranks_has_the_gradients_of_one_process(processes: LocalRanks) -> None:
    """Others divided experts by the size of the wrong mesh, or clipped each mesh by its own norm."""
    found = processes.run(rank_training.fully_sharded, [(rank,) for rank in range(4)])
    for results in found:
        for errors, norm, alone in results:
            assert max(errors) < 1e-5 and alone > 1
            assert norm == pytest.approx(alone, rel=1e-5)
    assert len({tuple(norm for _, norm, _ in results) for results in found}) == 1


pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3
MOST = torch.tensor([1e-4, 1e-3])  # of losses and norms


def assert_same(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    off = (torch.tensor(found) / torch.tensor(expected) - 1).abs()
    assert off.shape == (STEPS, 2) and (off <= MOST).all(), off


@quick(lambda precision, placed_first: precision == ("fp8" if placed_first else "fp8-saved"))
@pytest.mark.parametrize("placed_first", [True, False])
@pytest.mark.parametrize("precision", ["fp8", "fp8-ste", "fp8-saved"])
def test_the_precision_is_set_before_or_after_experts_are_placed(processes, precision, placed_first):
    told = ("qwen3_moe", precision, placed_first)
    ((alone, _),) = processes.run(rank_training.train_a_model, [(0, 1, STEPS, *told)])
    for history, _ in processes.run(rank_training.train_a_model, [(rank, 2, STEPS, *told) for rank in range(2)]):
        assert_same(history, alone)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # gpt-oss: biases, (E, in, out), gate and up in turns
def test_under_fsdp_the_gathered_share_keeps_the_precision(processes: LocalRanks, family: str) -> None:
    ((alone, _),) = processes.run(rank_training.train_a_model, [(0, 1, STEPS, family, "fp8")])
    jobs = [(rank, STEPS, family, "fp8") for rank in range(4)]
    for history in processes.run(rank_training.train_fully_sharded, jobs):
        assert_same(history, alone)


def test_the_share_of_a_model_has_the_precision_until_it_is_taken_back() -> None:
    model, second = build("qwen3_moe"), object.__new__(Ranks)
    second.rank, second.count = 1, 4
    shard_model(model, second)
    before = dict(model.named_parameters())
    for precision, kind in (("fp8", Fp8Experts), ("auto", Fp8Experts), ("bf16", amoeba.ExpertWeights)):
        amoeba.set_precision(model, precision)
        assert {type(placed.local) for _, placed in sharded_modules(model).values()} == {kind}
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
    whole, own = (run_precision(each, "fp8", torch.device("cpu")) for each in (build("qwen3_moe"), model))
    assert EXPERTS == 6 and own.code_bytes * 3 == whole.code_bytes
    assert str(own).endswith("MiB on the first rank") and str(whole).endswith("MiB")


def settings(folder: Path, inputs: Path, **changes: Any) -> TrainSettings:
    few = {"steps": 6, "batch_size": 3, "log_every": 1, "eval_every": 6, "save_every": 2, "dtype": "float32"}
    found = tiny_settings("train", folder, inputs, **few, precision="fp8", **changes)
    assert isinstance(found, TrainSettings)
    return found


def history(folder: Path) -> list[tuple[float, float]]:
    """Losses and norms, step by step."""
    names = ("step_losses", "step_norms")
    return [pair for line in lines(folder, "train") for pair in zip(*(line[name] for name in names), strict=True)]


@pytest.mark.thorough
def test_the_command_over_two_ranks_stops_and_goes_on_in_one_process(processes: LocalRanks, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    tiny_run(settings(tmp_path / "alone", inputs), Quiet())
    over_ranks = settings(tmp_path / "run", inputs, experts="ranks")
    jobs = [(rank, 2, "train", over_ranks.as_dict(), (1, STEPS)) for rank in range(2)]
    reports, said = zip(*processes.run(rank_jobs.run_job, jobs), strict=True)
    assert all(report.interrupted and report.steps == STEPS for report in reports)
    (words,) = (text for text in said[0] if text.startswith("experts in fp8: "))
    assert "backend eager" in words and words.endswith("MiB on the first rank")
    report = tiny_run(over_ranks, Quiet(), resume=True, rank_zero=RankZero(Ranks()))
    assert not report.interrupted and report.steps == over_ranks.steps
    found, expected = (history(tmp_path / name) for name in ("run", "alone"))
    assert_same(found[:STEPS], expected[:STEPS])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=0)  # codes may differ
    assert {line["precision"] for line in lines(tmp_path / "run", "train")} == {"fp8"}
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["experts"]["precision"] == "fp8"
