"""examples/ray_batch.py on a local Ray cluster with two workers."""

import json
from pathlib import Path

import pytest
import torch

from amoeba.data.sources import read_prompts
from amoeba.jobs.generate.generate_prompts import Results, generate_prompts
from amoeba.jobs.generate.options import GenerationOptions
from tiny_runs import make_inputs

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[data]'")
ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_two_workers_write_what_generate_writes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import ray_batch

    folder = make_inputs(tmp_path / "inputs") / "base"
    asked = tmp_path / "prompts.txt"
    asked.write_text("".join(f"{'Once upon ' * (1 + number % 3)}{number}\n" for number in range(24)))
    options = GenerationOptions(8, temperature=1.2, seed=5, device=torch.device("cpu"))
    ray.init(
        num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT}/src:{ROOT}/examples"}}
    )
    try:
        found = ray_batch.answer(str(folder), asked, options=options, workers=2, batch=6, slots=3)
        found.write_json(str(tmp_path / "answers"))
    finally:
        ray.shutdown()
    parts = list((tmp_path / "answers").glob("*.json"))
    rows = {row["line"]: row for part in parts for row in map(json.loads, part.read_text().splitlines())}
    results = Results(tmp_path / "alone.jsonl", read_prompts(asked, False), "base", print)
    generate_prompts(folder, results, options)
    alone = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    assert len(rows) == len(alone) == 24
    assert all(rows[each["line"]]["text"] == each["text"] for each in alone)
