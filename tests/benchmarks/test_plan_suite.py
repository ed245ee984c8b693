"""`python -m benchmarks plan`: cells, budgets and verdicts; and one cell from its model to its row."""

from dataclasses import replace

import pytest

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
    cells = choose_cells(["qwen3_30b"], [], [], gpu=True)
    assert [cell.place for cell in cells[:4]] == ["resident"] * 2 + ["streamed"] * 2
    assert cells[-1].checkpointing and cells[-2].repeats > cells[0].repeats
    assert {cell.purpose for cell in cells} == {"generate", "finetune"}
    with pytest.raises(ValueError, match="--place: expected one of resident"):
        choose_cells([], [], ["elsewhere"], gpu=False)


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


@pytest.mark.thorough  # several processes
def test_a_cell_is_run_and_compared(tmp_path, monkeypatch):
    from amoeba.plan.machine import measured_machine

    monkeypatch.setattr(suite, "measured_machine", lambda **_: measured_machine(measure=False, gpu=False))
    (found,) = suite.measure([Cell("tiny", "generate", "resident", repeats=1, new_tokens=4)], tmp_path, gpu=False)
    assert found.error is None
    assert found.measured["peak_memory_bytes"] > 0 and found.ratio("generation_tokens_per_second") > 0
    assert len(suite._row(found)) == 10
