"""In which dtype a CPU computes: what `amoeba train` measures and keeps, and what a model is loaded in."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.core import load_core
from amoeba.jobs import cpu_dtype
from amoeba.jobs.train.training_loop import WatchedTrainer
from amoeba.system.cpu_features import has_bf16_instructions
from selection import quick
from tiny_models import build
from tiny_runs import Quiet, tiny_run, tiny_settings

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the dtype of a CPU")


class Machine:
    """A CPU on which a pass takes so long; `timed` are those that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = {torch.float32: 0.2, torch.bfloat16: 0.125}
        self.timed: list[torch.dtype] = []
        self.autocasts: list[bool] = []
        monkeypatch.setattr(cpu_dtype, "has_bf16_instructions", lambda: True)
        monkeypatch.setattr(cpu_dtype, "WORTH_MEASURING", 0.0)
        monkeypatch.setattr(cpu_dtype, "seconds_of_a_pass", self.time)
        monkeypatch.setattr(cpu_dtype, "load_average", lambda: 0.0)
        own = WatchedTrainer.training_step

        def step(trainer: Any, *arguments: Any) -> Any:
            self.autocasts.append(trainer.args.bf16)
            return own(trainer, *arguments)

        monkeypatch.setattr(WatchedTrainer, "training_step", step)

    def time(self, model: Any, batch: Any, dtype: torch.dtype) -> float:
        self.timed.append(dtype)
        return self.seconds[dtype]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    with suppress(CoreUnavailable):
        load_core()  # from the cache that all share: it would be compiled once more
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path / "cache"))
    return Machine(monkeypatch)


def run(folder: Path, inputs: Path, resume: bool = False, **changes: Any) -> list[str]:
    console = Quiet()
    told = {"steps": 2, "save_every": 1, "eval_every": 2, "log_every": 1} | changes
    tiny_run(tiny_settings("train", folder, inputs, **told), console, resume=resume)
    return [line for line in console.said if "on this CPU" in line]


@quick(lambda chosen: chosen == "bfloat16")
@pytest.mark.parametrize(("bf16", "chosen"), [(0.125, "bfloat16"), (0.25, "float32")])
def test_the_faster_one_is_taken_and_said_with_both_figures(bf16, chosen, machine, inputs, tmp_path):
    machine.seconds[torch.bfloat16] = bf16
    said = run(tmp_path / "run", inputs)
    assert said == [f"a pass of 2 rows on this CPU: 0.2 s in float32, {bf16} s in bfloat16; training in {chosen}"]
    assert machine.timed == [torch.float32, torch.bfloat16]
    assert machine.autocasts == [chosen == "bfloat16"] * 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["began_with"]["dtype"] == chosen


def test_a_resumed_run_keeps_it_and_times_nothing(machine, inputs, tmp_path):
    run(tmp_path / "run", inputs)
    machine.timed.clear(), machine.autocasts.clear()
    machine.seconds[torch.bfloat16] = 9.0
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert run(tmp_path / "run", inputs, resume=True, steps=2) == []
    for name in ("checkpoint-2", "model"):
        _remove(tmp_path / "run", name)
    assert run(tmp_path / "run", inputs, resume=True) == []
    assert (machine.timed, machine.autocasts) == ([], [True])


def _remove(folder: Path, name: str) -> None:
    """So that the run has a step to go."""
    for path in (folder / name, folder / "checkpoints" / name):
        if path.exists():
            path.rename(folder.parent / f"removed {name}")


def test_another_run_of_the_model_takes_the_figures_that_were_kept(machine, inputs, tmp_path):
    first = run(tmp_path / "first", inputs, steps=1)
    assert run(tmp_path / "second", inputs, steps=1) == first
    assert machine.timed == [torch.float32, torch.bfloat16]
    run(tmp_path / "third", inputs, steps=1, sequence_length=16)
    assert len(machine.timed) == 4


@quick(lambda reason: reason != "a short run")
@pytest.mark.parametrize("reason", ["no instructions for bf16", "a short run", "asked for"])
def test_nothing_is_timed_where_it_cannot_pay(reason, machine, inputs, tmp_path, monkeypatch):
    if reason == "no instructions for bf16":
        monkeypatch.setattr(cpu_dtype, "has_bf16_instructions", lambda: False)
    elif reason == "a short run":
        monkeypatch.setattr(cpu_dtype, "WORTH_MEASURING", 1e13)
    changes = {"dtype": "bfloat16"} if reason == "asked for" else {}
    assert run(tmp_path / "run", inputs, **changes) == []
    assert machine.timed == []
    assert machine.autocasts == [bool(changes)] * 2


def test_a_model_that_fails_trains_in_fp32(machine, inputs, tmp_path, monkeypatch):
    def fails(*_: Any) -> float:
        raise NotImplementedError("no such product")

    monkeypatch.setattr(cpu_dtype, "seconds_of_a_pass", fails)
    assert run(tmp_path / "run", inputs) == []
    assert machine.autocasts == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_timed_pass_leaves_nothing_behind(dtype):
    model: Any = build("qwen3_moe")
    model.eval()
    ids = torch.arange(12).view(2, 6)
    before, random = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    assert 0 < cpu_dtype.seconds_of_a_pass(model, {"input_ids": ids, "labels": ids}, dtype) < 60
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


OWN = (None, None, "the checkpoint's own")


class TestLoading:
    """What `amoeba generate` and `amoeba finetune` take where --dtype is left out."""

    @pytest.fixture(autouse=True, params=[True, False], ids=["bf16 instructions", "none"])
    def has_instructions(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
        monkeypatch.setattr(cpu_dtype, "has_bf16_instructions", lambda: request.param)
        return request.param

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    def test_half_precision_is_loaded_in_float32_without_bf16_instructions(self, stored, has_instructions):
        choice = cpu_dtype.dtype_to_load(None, "a/model", PreTrainedConfig(dtype=stored), CPU)
        if has_instructions:
            assert choice == OWN
        else:
            assert choice[:2] == (torch.float32, stored)
            assert choice.reason == f"faster on this CPU than the checkpoint's {str(stored).removeprefix('torch.')}"

    def test_what_is_asked_for_a_gpu_and_float32_are_left_alone(self):
        half, single = (PreTrainedConfig(dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        assert cpu_dtype.dtype_to_load(torch.bfloat16, "a/model", half, CPU) == (torch.bfloat16, None, "as requested")
        assert cpu_dtype.dtype_to_load(None, "a/model", half, torch.device("cuda")) == OWN
        assert cpu_dtype.dtype_to_load(None, "a/model", single, CPU) == OWN
        assert cpu_dtype.dtype_to_load(None, "a/model", PreTrainedConfig(), CPU) == OWN

    def test_a_configuration_that_does_not_tell_leaves_it_to_the_weights(self, has_instructions, tmp_path):
        build("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
        stored = cpu_dtype.dtype_to_load(None, str(tmp_path), PreTrainedConfig(), CPU).stored
        assert stored == (None if has_instructions else torch.bfloat16)


def test_this_cpu_loads_bf16_in_what_it_multiplies():
    choice = cpu_dtype.dtype_to_load(None, "a/model", PreTrainedConfig(dtype=torch.bfloat16), CPU)
    assert choice.dtype == (None if has_bf16_instructions() else torch.float32)
