"""`python -m benchmarks plan`: cells, budgets and verdicts; and one cell from its model to its row."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from amoeba.plan.machine import described_machine
from amoeba.plan.memory import Work
from amoeba.plan.model import read_facts
from amoeba.plan.plan import make_plan
from benchmarks import plan as suite
from benchmarks.plan import Cell, Found, choose_cells
from sparse_models import qwen3_30b, sparse_model


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return read_facts(str(sparse_model(tmp_path_factory.mktemp("sparse"), qwen3_30b(num_hidden_layers=4))))


def test_the_most_telling_cells_come_first_and_unknown_ones_are_refused():
    cells = suite._telling_first(choose_cells([], [], [], gpu=True))
    assert [(cell.place, cell.budget) for cell in cells[:5]] == [
        ("resident", None), ("cpu-bf16", None), ("mxfp4-weights", None), ("fp8-weights", None), ("streamed", None),
    ]  # fmt: skip
    assert len(cells) == len({*cells}) >= 30, "the number that a table of cells has at least"
    assert [cell.budget for cell in cells if cell.budget] == ["8GiB", "16GiB", "24GiB"]
    assert {cell.purpose for cell in cells} == {"generate", "finetune"}
    few = choose_cells(["1b"], ["finetune"], ["streamed"], gpu=True)
    assert [(cell.model, cell.purpose, cell.place) for cell in few] == [("1b", "finetune", "streamed")]
    with pytest.raises(ValueError, match="--place: expected one of resident"):
        choose_cells([], [], ["elsewhere"], gpu=False)


def test_a_second_run_has_the_cells_that_the_first_did_not_measure(tmp_path):
    cells = choose_cells(["1b"], ["generate"], [], gpu=True)
    measured, failed = Found(cells[0], {}, {}), Found(cells[1], {}, {}, suite.NO_TIME)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"cells": [asdict(each) for each in (measured, failed)]}))
    assert suite.not_in(path, cells) == cells[1:]
    path.write_text('{"document": "cold"}')
    with pytest.raises(ValueError, match="--after: expected a document of python -m benchmarks plan"):
        suite.not_in(path, cells)


@pytest.mark.parametrize(("budget", "slots"), [("2GiB", 20), ("4GiB", 77)])
def test_a_budget_alone_has_the_slots_that_the_command_gives_it(facts, budget, slots, monkeypatch):
    monkeypatch.setattr("amoeba.stream.attaching.available_memory", lambda device: 100 << 30)
    work = Work("generate", context=512, batch=1, prompt=448)
    found = suite._within(budget, facts, described_machine("h200"), work)
    assert found.choice.budgets.slots == pytest.approx([slots] * 4, abs=1)
    assert found.choice.budgets.host_slots == [128] * 4, "all of them have room in host memory"
    assert found.options == {"vram": budget} and found.gpu_bytes > int(budget[0]) << 30


def test_a_checkpoint_has_the_numbers_of_its_configuration(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    suite._write_model(tmp_path, suite.MODELS["tiny"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    assert experts.dtype == torch.bfloat16 and 0.019 < experts.float().std() < 0.021
    assert not torch.equal(experts[0], experts[1])
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert read_facts(str(tmp_path / "bf16")).expert_numbers == 2 * 8 * 3 * 64 * 64
    row = json.loads((tmp_path / "finetune.jsonl").read_text().splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bf16")
    assert len(tokenizer(row["completion"])["input_ids"]) > 4096, "rows that fill every sequence"


def test_experts_over_ranks_are_cells_of_their_own():
    cells = choose_cells(["tiny"], [], [], gpu=False, ranks=[2, 4])
    assert [(cell.purpose, cell.place, cell.ranks) for cell in cells] == [
        ("finetune", "ranks", 2), ("finetune", "ranks", 4), ("train", "ranks", 2), ("train", "ranks", 4),
    ]  # fmt: skip
    work = suite._work(cells[1])
    assert (work.ranks, work.batch) == (4, 2), "rows of each rank"


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("purpose", ["generate", "finetune"])
def test_a_budget_has_room_for_its_share_of_the_experts(facts, share, purpose):
    work = Work(purpose, context=512, batch=2, rank=8, checkpointing=False)
    machine = suite._with_share(facts, described_machine("h200"), work, share)
    found = make_plan(facts, machine, work, helps=False).candidates
    streamed = suite._candidate(found, Cell("qwen3_30b", purpose, "streamed"))
    assert streamed.choice.budgets.slots == pytest.approx([128 * share] * 4, abs=1)


def test_a_peak_above_the_plan_or_far_below_it_is_wrong():
    cell = Cell("tiny", "generate", "resident")
    for measured, right in ((101, False), (100, True), (93, True), (91, False)):
        found = Found(cell, {"peak_memory_bytes": 100}, {"peak_memory_bytes": measured})
        assert found.is_right == right
    assert not replace(found, error="refused").is_right


def test_what_is_chosen_is_compared_with_the_fastest_that_rounds_nothing():
    def found(place, speed, **more):
        return Found(Cell("middle", "generate", place), {}, {"generation_tokens_per_second": speed}, **more)

    slow, fast = found("resident", 70, is_chosen=True), found("cpu-bf16", 120)
    rounded, failed = found("cpu-int8", 160, rounds=True), found("streamed", 999, error="refused")
    other = Found(Cell("middle", "finetune", "resident"), {}, {"tokens_per_second": 5}, is_chosen=True)
    assert suite.choices([slow, fast, rounded, failed, other]) == [(slow, fast)]


@pytest.mark.thorough  # several processes
def test_a_cell_is_run_and_compared(tmp_path, monkeypatch):
    from amoeba.plan.machine import measured_machine

    monkeypatch.setattr(suite, "measured_machine", lambda **_: measured_machine(measure=False, gpu=False))
    (found,) = suite.measure([Cell("tiny", "generate", "resident", prompt=13, new_tokens=4)], tmp_path, gpu=False)
    assert found.error is None
    assert found.measured["peak_memory_bytes"] > 0 and found.ratio("generation_tokens_per_second") > 0
    assert len(suite._row(found)) == 10
