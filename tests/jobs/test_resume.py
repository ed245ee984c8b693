"""A resumed run is the same run, or it says why not; and what was good stays until something better is whole."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from amoeba.data.corpus import Corpus
from amoeba.data.documents import Text
from amoeba.jobs.settings import AT_RESUME
from amoeba.jobs.train import training_loop
from amoeba.jobs.train.metrics import RunLog
from amoeba.jobs.train.resume import Earlier, began_with, check_data, settings_of
from amoeba.jobs.train.run_folder import checkpoints, remove_unfinished, run_folder
from amoeba.jobs.train.training_loop import WatchedTrainer
from called import call
from selection import each_value_once, quick
from tiny_runs import KEPT, KINDS, WEIGHTS, Quiet, kept_weights, tiny_run, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore")
COMMANDS = ("train", "finetune")
SIGNALS = {"train": signal.SIGINT, "finetune": signal.SIGTERM}


class Terminator(Quiet):
    """Sends a signal after step 9, between the checkpoints of step 8 and of step 12."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number

    def step(self, line: dict[str, Any], total: int) -> None:
        super().step(line, total)
        if line["step"] == 9:
            os.kill(os.getpid(), self.signal_number)


# What both commands leave to the same code: every run has it for one of them.
once = quick(lambda command: command == "train")


@pytest.fixture(scope="module", params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(command: str, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was never interrupted, and its report."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, tiny_run(tiny_settings(command, folder, inputs), Quiet())


@pytest.fixture(scope="module")
def terminated(command: str, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Quiet]:
    folder, console = tmp_path_factory.mktemp("terminated") / "run", Terminator(SIGNALS[command])
    return folder, tiny_run(tiny_settings(command, folder, inputs), console), console


@pytest.fixture
def run(terminated: tuple[Path, Any, Quiet], tmp_path: Path) -> Path:
    """A copy of the terminated run, with checkpoints of the steps 8 and 9."""
    return shutil.copytree(terminated[0], tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def refusal(settings: Any, **options: Any) -> str:
    """The sentence with which a resume is refused; nothing in the folder has changed."""
    before = contents(Path(settings.out))
    with pytest.raises(ValueError) as caught:
        tiny_run(settings, Quiet(), resume=True, **options)
    assert contents(Path(settings.out)) == before
    return str(caught.value)


def resume(run: Path, command: str, **options: Any) -> tuple[Any, Quiet]:
    console = Quiet()
    return tiny_run(settings_of(KINDS[command], str(run), None, {}), console, resume=True, **options), console


# --- control-C, SIGTERM, and where a run goes on


def test_a_signal_writes_a_checkpoint_and_says_how_to_go_on(terminated: tuple[Path, Any, Quiet], command: str) -> None:
    folder, report, console = terminated
    assert (report.interrupted, report.exit_code, report.steps) == (True, 128 + SIGNALS[command], 9)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-8", "checkpoint-9"]
    assert f"stopped at step 9; continue with: amoeba {command} --resume {folder}" in console.said
    assert not (folder / KEPT[command]).exists()
    evaluated = [line for line in logged(folder) if line["kind"] == "eval"]
    assert evaluated[-1]["step"] == report.final_loss_step < 9 and evaluated[-1]["loss"] == report.final_loss
    shown = f"{report.start_loss:.3f} -> {report.final_loss:.3f} at step {report.final_loss_step}"
    assert report.losses() == shown
    assert dataclasses.replace(report, steps=report.final_loss_step).losses() == shown.partition(" at")[0]
    assert (
        dataclasses.replace(report, final_loss_step=0).losses()
        == f"{report.start_loss:.3f} at step 0, and not measured since"
    )


@once
def test_a_run_that_goes_on_and_is_stopped_again_has_the_last_loss_of_before(run: Path, command: str) -> None:
    class AtOnce(Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    before = [line["step"] for line in logged(run) if line["kind"] == "eval"][-1]
    settings = settings_of(KINDS[command], str(run), None, {"log_every": 1, "eval_every": 100})
    assert tiny_run(settings, AtOnce(), resume=True).final_loss_step == before > 0


@once
def test_a_second_signal_stops_at_once(inputs: Path, tmp_path: Path, command: str) -> None:
    class Twice(Quiet):
        def step(self, line: dict[str, Any], total: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        tiny_run(tiny_settings(command, tmp_path / "run", inputs), Twice())
    assert caught.value.code == 143
    assert not checkpoints(tmp_path / "run")


@quick(lambda start_from, command: (start_from is None) == (command == "train"))
@pytest.mark.parametrize("start_from", [None, "8"])
def test_a_resumed_run_ends_with_the_same_bits(start_from, run, whole, command):
    torn = run / "checkpoints" / "writing" / "checkpoint-10"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_text("half of what a killed run wrote")
    report, console = resume(run, command, start_from=start_from)
    assert not torn.exists()
    assert f"resuming from checkpoint-{8 if start_from else 9}" in console.said
    assert kept_weights(run, command) == kept_weights(whole[0], command)
    assert report.final_loss == whole[1].final_loss and report.start_loss == whole[1].start_loss
    last = [[line["tokens"] for line in logged(folder) if line["kind"] == "train"][-1] for folder in (run, whole[0])]
    assert last[0] == last[1]  # counted from the first step on
    aside = run / "checkpoints" / "set-aside-checkpoint-9"
    assert aside.exists() == (start_from is not None)


def forget(run: Path, *names: str) -> None:
    """As a version that did not know these wrote its record."""
    record = json.loads((run / "config.json").read_text())
    kept = {name: value for name, value in record.items() if name not in ("digest", *names)}
    (run / "config.json").write_text(json.dumps(kept))


@once
def test_a_run_of_a_version_without_a_setting_had_its_default(run: Path, command: str) -> None:
    forget(run, "weight_decay")
    told = settings_of(KINDS[command], str(run), None, {})
    said = refusal(dataclasses.replace(told, weight_decay=0.25))
    assert f"--weight-decay: expected {told.weight_decay}, as in the run" in said
    resume(run, command)


@once
def test_a_run_without_what_it_began_with_is_refused(run: Path, command: str) -> None:
    forget(run, "began_with")
    said = refusal(settings_of(KINDS[command], str(run), None, {}))
    assert "config.json: expected the record of a run; got one without began_with. Start a new run" in said


@once
def test_an_unknown_checkpoint_is_refused(run: Path, command: str) -> None:
    told = settings_of(KINDS[command], str(run), None, {})
    assert "--from: expected a checkpoint of" in refusal(told, start_from="checkpoint-7")
    with pytest.raises(ValueError, match="--from: expected --resume as well"):
        tiny_run(dataclasses.replace(told, out=str(run.parent / "new")), Quiet(), start_from="checkpoint-8")


# --- finished runs


def test_a_finished_run_says_so_and_is_left_alone(whole: tuple[Path, Any], command: str) -> None:
    folder, report = whole
    before = contents(folder)
    result = call(command, "--resume", folder, "--json")
    assert "already finished after 12 steps" in result.output
    assert result.document == dataclasses.asdict(report)
    assert contents(folder) == before


@each_value_once()
@pytest.mark.parametrize("lost", ["result", "both"])
def test_a_run_killed_after_its_last_step_is_ended_without_another(lost, whole, command, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(run / KEPT[command])
    if lost == "both":  # the last line of the log too
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    report, console = resume(run, command)
    assert not console.lines
    assert (report.steps, report.final_loss) == (12, whole[1].final_loss)
    assert kept_weights(run, command) == kept_weights(whole[0], command)
    assert any("1 incomplete line skipped" in said for said in console.said) == (lost == "both")
    kinds = [line["kind"] for line in logged(run)]
    assert kinds.count("coactivation") == kinds.count("final") == 1


def test_a_damaged_result_of_a_finished_run_is_named(whole: tuple[Path, Any], command: str, tmp_path: Path) -> None:
    run = shutil.copytree(whole[0], tmp_path / "run")
    (run / WEIGHTS[command]).write_bytes(b"")
    said = refusal(settings_of(KINDS[command], str(run), None, {}))
    assert f"{Path(WEIGHTS[command]).name} is empty" in said and "resume again" in said


# --- the data and the model


@once
def test_appended_data_is_refused_with_what_changed_and_what_to_do(run: Path, command: str, tmp_path: Path) -> None:
    told = settings_of(KINDS[command], str(run), None, {})
    assert told.data is not None
    longer = tmp_path / "longer.jsonl"
    longer.write_text(Path(told.data).read_text() * 3 + '{"prompt": "And ", "completion": "more."}\n')
    said = refusal(dataclasses.replace(told, data=str(longer)))
    assert "the data: expected the" in said and "documents" in said and "restore the data" in said.lower()
    assert f"start a new run: amoeba {command}" in said


def test_other_text_of_the_same_length_is_refused(tmp_path: Path) -> None:
    then, now = (began_with(Corpus([Text(text)], [Text("held out")], "")) for text in ("ab", "ba"))
    earlier = Earlier(tmp_path, "amoeba train", None, {}, then)
    check_data(earlier, then)
    with pytest.raises(ValueError, match=r"expected the 1 documents \(2 characters\) to train on.*with different text"):
        check_data(earlier, now)


def test_another_model_under_the_same_name_is_refused(run: Path, command: str, inputs: Path, tmp_path: Path) -> None:
    base = shutil.copytree(inputs / "base", tmp_path / "base")
    told = dataclasses.replace(settings_of(KINDS[command], str(run), None, {}), model=str(base))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    said = refusal(told)
    assert "rms_norm_eps" in said and "got rms_norm_eps 0.5" in said
    if command == "finetune":  # the weights are not in its checkpoints
        (base / "config.json").write_text(json.dumps(config))
        stored = bytearray((base / "model.safetensors").read_bytes())
        stored[len(stored) // 2] ^= 1
        (base / "model.safetensors").write_bytes(stored)
        assert "MODEL: expected the weights" in (said := refusal(told)) and "model.safetensors" in said


# --- settings

OTHER: dict[str, Any] = {
    "model": "olmoe", "data": None, "held_out": 0.3, "batch_size": 3, "accumulation": 3, "sequence_length": 33,
    "steps": 13, "epochs": 2.0, "learning_rate": 2e-2, "warmup_steps": 3, "weight_decay": 0.3, "balance": "unlike",
    "minutes": 4.0, "aux_loss_coefficient": 0.5, "z_loss_coefficient": 0.5, "bias_rate": 0.5, "seed": 7,
    "dtype": "bfloat16", "vocab_size": 333, "r": 3, "alpha": 3.0, "targets": ("experts",), "train_router": False,
    "compile": "off", "optimizer_states": "bfloat16", "precision": "fp8",
    "experts": "resident", "log_every": 2, "eval_every": 5, "save_every": 5, "gradient_checkpointing": True,
    "exact": True, "expert_ranks": None, "dense": "ddp",  # others want ranks: tests/parallel/test_fully_sharded_runs.py
    "out": None, **({"ram": None, "vram": "1GiB"} if torch.cuda.is_available() else {"ram": "1GiB", "vram": None}),
}  # fmt: skip


@each_value_once()
@pytest.mark.parametrize("name", sorted({field.name for kind in KINDS.values() for field in dataclasses.fields(kind)}))
def test_each_setting_is_refused_where_it_cannot_change(name, terminated, command):
    if name not in {field.name for field in dataclasses.fields(KINDS[command])}:
        pytest.skip(f"not a setting of {command}")
    told = settings_of(KINDS[command], str(terminated[0]), None, {})
    if AT_RESUME[name] in ("changeable", "place"):
        return  # the next two tests
    earlier, other = getattr(told, name), OTHER[name]
    if name == "balance":
        other = "none" if earlier == "aux" else "aux"
    if command == "finetune" and name == "data":
        other = "elsewhere.jsonl"
    if command == "finetune" and name == "model":
        pytest.skip("a name that is no folder is one of the hub's")
    if command == "train" and name == "experts":
        pytest.skip("over ranks the numbers are the same, see tests/parallel/test_commands_over_ranks.py")
    said = refusal(dataclasses.replace(told, **{name: other}))
    before, got = (
        "none" if each is None else repr(list(each) if isinstance(each, tuple) else each) for each in (earlier, other)
    )
    assert said.startswith(f"--{name.replace('_', '-')}: expected ") and before in said and f"; got {got}" in said
    if name == "steps":  # an adapter is no model to start from
        assert ("train longer when the run has ended: amoeba train --model" in said) == (command == "train")


@once
def test_what_may_change_is_applied_and_recorded(run: Path, inputs: Path, command: str, tmp_path: Path) -> None:
    known = {field.name for field in dataclasses.fields(KINDS[command])}
    changeable = {name: OTHER[name] for name, kind in AT_RESUME.items() if kind == "changeable" and name in known}
    moved = shutil.copytree(inputs, tmp_path / "moved")
    paths = {"model": str(moved / "base"), "data": str(moved / f"{command}.jsonl")}
    told = settings_of(KINDS[command], str(run), None, changeable | paths)
    console = Quiet()
    assert tiny_run(told, console, resume=True).steps == 12
    assert [line["step"] for line in console.lines] == [10, 12]
    assert [path.name for path in checkpoints(run)] == ["checkpoint-10", "checkpoint-12"]
    evaluated = logged(run)
    assert [line["step"] for line in evaluated if line["kind"] == "eval"] == [0, 6, 10, 12]
    assert settings_of(KINDS[command], str(run), None, {}) == told


@once
def test_a_config_file_and_out_are_not_ignored(run: Path, command: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("learning_rate: 0.5\n")
    before = contents(run)
    for words, said in {
        ("--config", str(tmp_path / "other.yaml")): "--learning-rate: expected 0.01",
        ("--out", str(tmp_path / "elsewhere")): "--out: expected the folder of --resume",
        ("--seed", "3"): "--seed: expected 0, as in the run in",
    }.items():
        result = call(command, "--resume", run, *words, code=2)
        assert said in result.said
    assert contents(run) == before


@once
@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_record_of_the_settings_is_named(how: str, run: Path, command: str) -> None:
    path = run / "config.json"
    text = path.read_text()
    path.write_text({"truncated": text[:50], "flipped": text.replace("0.01", "0.02"), "empty": ""}[how])
    result = call(command, "--resume", run, code=2)
    assert "config.json: expected the settings" in result.said


# --- damaged checkpoints


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {"missing": None, "empty": lambda content: b"", "truncated": lambda content: content[:-7], "flipped": flip}


@each_value_once()
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_file_is_named_and_the_checkpoint_before_offered(damage, run, command):
    told = settings_of(KINDS[command], str(run), None, {})
    files = sorted((run / "checkpoints" / "checkpoint-9").iterdir())
    must = {"scheduler.pt", "rng_state.pth", "trainer_state.json", "tokenizer.json", "manifest.json"}
    must |= {"optimizer.json", "optimizer-00000-of-00001.safetensors"}
    assert must | {Path(WEIGHTS[command]).name} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        path.unlink()
        if DAMAGES[damage] is not None:
            path.write_bytes(DAMAGES[damage](content))
        said = refusal(told)
        assert f"checkpoint-9: expected a complete checkpoint; got {path.name} " in said, said
        assert f"amoeba {command} --resume {run} --from checkpoint-8" in said
        path.write_bytes(content)
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    files[0].write_bytes(b"")
    assert "No earlier checkpoint is complete" in refusal(told)


@once
def test_a_lost_log_loses_no_training(run: Path, command: str, whole: tuple[Path, Any]) -> None:
    (run / "metrics.jsonl").unlink()
    report, console = resume(run, command)
    assert any("metrics.jsonl is missing" in said for said in console.said)
    assert kept_weights(run, command) == kept_weights(whole[0], command)
    assert report.start_loss == whole[1].start_loss


# --- two runs, one folder


@once
def test_two_runs_do_not_write_into_one_folder(run: Path, command: str) -> None:
    told = settings_of(KINDS[command], str(run), None, {})
    with run_folder(str(run), True, print):
        assert f"process {os.getpid()} on " in (said := refusal(told)) and "--resume: expected a folder that no" in said
        with pytest.raises(ValueError, match="--out: expected a folder that no other run writes to"):
            tiny_run(told, Quiet())
    with run_folder(str(run), True, print):
        pass  # the lock went with its holder


# --- numbers that are not finite


def finite_checkpoints(folder: Path) -> bool:
    files = [path for checkpoint in checkpoints(folder) for path in checkpoint.glob("*.safetensors")]
    return all(bool(tensor.isfinite().all()) for path in files for tensor in load_file(path).values())


@once
def test_a_diverging_run_stops_and_keeps_what_was_good(inputs: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "run"
    told = tiny_settings(command, folder, inputs, learning_rate=1e30, steps=60, log_every=60, save_every=2)
    words = [command] + ([told.model] if command == "finetune" else ["--model", told.model])
    words += ["--data", str(told.data), "--out", str(folder), "--learning-rate=1e30", "--steps=60", "--log-every=60"]
    result = call(*words, "--save-every=2", "--batch-size=2", "--sequence-length=32", code=None)
    said = result.said
    assert result.exit_code not in (0, 130, 143)
    assert "training: expected finite numbers" in said and "lower --learning-rate (it is 1e+30)" in said.lower()
    assert "Traceback" not in said
    assert checkpoints(folder) and finite_checkpoints(folder)
    assert not (folder / KEPT[command]).exists()


POISON = {
    "gradient": "the norm of the gradient of step 6 is nan",
    "parameter": "a parameter is nan after step 6",
    "evaluation": "the held-out loss of step 6 is nan",
}


@once
@pytest.mark.parametrize("what", POISON)
def test_whatever_is_not_finite_is_found_before_a_checkpoint_is_written(what, inputs, tmp_path, command, monkeypatch):
    def poison(tensors: Any) -> None:
        next(iter(tensors)).data.view(-1)[0] = torch.nan

    pass_of, step_end = WatchedTrainer.training_step, RunLog.on_step_end

    def training_step(self: Any, *arguments: Any, **options: Any) -> Any:
        loss = pass_of(self, *arguments, **options)
        if what == "gradient" and self.state.global_step == 5:
            poison(p.grad for p in self.model.parameters() if p.grad is not None)
        return loss

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
        step_end(self, args, state, control, **options)
        if what != "gradient" and state.global_step == 6:
            poison(self.trained_parameters)

    monkeypatch.setattr(WatchedTrainer, "training_step", training_step)
    monkeypatch.setattr(RunLog, "on_step_end", on_step_end)
    changes = {"save_every": 3, "log_every": 50, "eval_every": 6 if what == "evaluation" else 50}
    with pytest.raises(ValueError, match=POISON[what]):
        tiny_run(tiny_settings(command, tmp_path / "run", inputs, **changes), Quiet())
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3"]
    assert finite_checkpoints(tmp_path / "run")


# --- full disks, and replacements that are cut short


@once
@pytest.mark.parametrize("when", ["_save", "seal", "replace_folder"])
def test_a_disk_that_fills_up_anywhere_in_a_checkpoint_leaves_the_last_one(when, run, command, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_loop if hasattr(training_loop, when) else WatchedTrainer, when, full)
    before = contents(run / "checkpoints")
    with pytest.raises(ValueError, match=r"checkpoint of step 12.*No space left.*--resume.*from step 9"):
        resume(run, command)
    assert contents(run / "checkpoints") == before


def test_a_result_that_cannot_be_written_leaves_the_one_before(whole, command, tmp_path, monkeypatch):
    run = shutil.copytree(whole[0], tmp_path / "run")
    before = contents(run / KEPT[command])
    save = WatchedTrainer._save

    def full(self: Any, folder: str) -> None:
        save(self, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WatchedTrainer, "_save", full)
    with pytest.raises(ValueError, match=rf"{KEPT[command]}: expected enough space.*No space left"):
        resume(run, command, start_from="checkpoint-12")
    assert contents(run / KEPT[command]) == before
    assert not list(run.glob(".*.writing"))


@pytest.mark.parametrize("killed_before", [1, 2])
def test_a_replacement_that_is_killed_half_way_is_undone(killed_before, tmp_path, monkeypatch):
    from amoeba.system import files

    class Killed(BaseException):
        pass

    for name in ("model", "staged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    renames, rename = 0, os.replace

    def counted(*arguments: Any) -> None:
        nonlocal renames
        renames += 1
        if renames == killed_before:
            raise Killed
        rename(*arguments)

    monkeypatch.setattr(files.os, "replace", counted)
    with pytest.raises(Killed):
        files.replace_folder(tmp_path / "staged", tmp_path / "model")
    monkeypatch.undo()
    remove_unfinished(tmp_path, "model")
    assert (tmp_path / "model" / "which").read_text() == "model"
    files.replace_folder(tmp_path / "staged", tmp_path / "model")
    assert (tmp_path / "model" / "which").read_text() == "staged"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- Killed and resumed runs end with the bits of undisturbed ones; tests/support/kill_loop.py goes on for longer


SUPPORT = Path(__file__).parents[1] / "support"


# In every run: the bits of resumed runs in test_resume.py.
@pytest.mark.thorough
@pytest.mark.parametrize("kills", [1, 4])
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_killed_and_resumed_runs_end_with_the_bits_of_undisturbed_ones(command: str, kills: int) -> None:
    arguments = ["--rounds=1", f"--kills={kills}", "--seed=0", f"--command={command}"]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "kill_loop.py"), *arguments],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT.parents[1] / 'src'}{os.pathsep}{SUPPORT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["identical"] == {command: 1}
