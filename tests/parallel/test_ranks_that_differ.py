"""Ranks that were started with different words, files or surroundings: all stop at the start, and say what differs.

What is compared is in tests/jobs/test_same_on_ranks.py; here are processes that would otherwise train, or hang.
"""

import shutil
import time
from pathlib import Path

import pytest

import rank_jobs
from amoeba.parallel.processes import LocalRanks
from selection import quick
from tiny_runs import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    other = shutil.copytree(folder / "base", folder / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "shorter.jsonl").write_text("".join(lines[:-1]))
    (folder / "moved.jsonl").write_text("".join(lines))
    return folder


def words_of(command: str, inputs: Path, run: Path) -> list[str]:
    if command == "generate":
        return ["generate", str(inputs / "base"), "In", "--max-new-tokens", "2", "--experts", "ranks"]
    model = ["--model", str(inputs / "base")] if command == "train" else [str(inputs / "base")]
    words = [command, *model, "--data", str(inputs / f"{command}.jsonl"), "--out", str(run), "--steps", "3"]
    return [*words, "--sequence-length", "32", "--dtype", "float32"]


# command, what rank 2 is told besides, and how what all of them say begins
DIFFERENT = [
    ("train", ["--learning-rate", "0.05"], "--learning-rate: expected the same on all ranks; got 0.002 on ranks 0"),
    ("train", ["--seed", "7"], "--seed: expected the same on all ranks; got 0 on ranks 0, 1, 3, 7 on rank 2"),
    ("train", ["--batch-size", "5"], "--batch-size: expected the same on all ranks; got 8 on ranks 0, 1, 3, 5 on rank"),
    ("train", ["--log-every", "1"], "--log-every: expected the same"),
    ("train", ["--model", "{inputs}/other"], "model.safetensors of --model: expected the same"),
    ("train", ["--model", "demo"], '--model and '),
    ("train", ["--experts", "ranks"], '--experts: expected the same on all ranks; got "resident" on ranks 0, 1, 3'),
    ("train", ["--data", "{inputs}/shorter.jsonl"], "documents to train on and "),
    ("finetune", ["--lora-rank", "2"], "--r: expected the same"),
    ("generate", ["--temperature", "0.5"], "--temperature: expected the same"),
    ("generate", ["--experts", "resident"], '--experts: expected the same on all ranks; got "ranks" on ranks 0, 1, 3'),
]  # fmt: skip


@quick(lambda more: more[0] in ("--learning-rate", "--seed", "--batch-size", "--experts") or "other" in more[-1])
@pytest.mark.parametrize(("command", "more", "said"), DIFFERENT, ids=[" ".join(more) for _, more, _ in DIFFERENT])
def test_all_ranks_stop_at_the_start_and_the_first_says_what_differs(processes, inputs, tmp_path, command, more, said):
    words = words_of(command, inputs, tmp_path / "run")
    others = [*words, *(word.format(inputs=inputs) for word in more)]
    began = time.monotonic()
    found = processes.run(rank_jobs.run_command, [(rank, 4, others if rank == 2 else words) for rank in range(4)])
    assert time.monotonic() - began < 30
    assert [code for code, *_ in found] == [2] * 4
    assert f"amoeba: {said}" in found[0][2]
    assert [(out, err) for _, out, err in found[1:]] == [("", "")] * 3  # the same words, told once
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_the_same_data_under_another_name_is_the_same_data(processes: LocalRanks, inputs: Path, tmp_path: Path) -> None:
    words = words_of("train", inputs, tmp_path / "run")
    moved = [*words, "--data", str(inputs / "moved.jsonl")]
    found = processes.run(rank_jobs.run_command, [(rank, 4, moved if rank == 2 else words) for rank in range(4)])
    assert [code for code, *_ in found] == [0] * 4


def test_a_run_folder_that_a_host_does_not_see_is_refused(processes: LocalRanks, tmp_path: Path) -> None:
    shared, other = str(tmp_path / "run"), str(tmp_path / "of another host")
    assert processes.run(rank_jobs.see_folder, [(rank, 2, shared) for rank in range(2)]) == ["seen", "seen"]
    first, second = processes.run(rank_jobs.see_folder, [(0, 2, shared), (1, 2, other)])
    assert second.startswith("--out: expected a folder on a file system that all hosts share (process ")
    assert f"got {other}, which is another one on " in second
    assert "rank 1 failed: --out: expected a folder on a file system" in first
