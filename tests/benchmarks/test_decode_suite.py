"""`python -m benchmarks decode`: formats side by side, what a step reads, and cells that fail alone."""

import pytest
import torch

from amoeba.core.errors import BadValue
from benchmarks import decode
from benchmarks.decode import Cell, build, bytes_of_a_step, choose_cells, measure

CPU = torch.device("cpu")


def test_formats_are_measured_one_after_the_other_and_what_fails_says_so() -> None:
    cells = [Cell("tiny", 1, format, 2, prompt=5, new_tokens=3) for format in ("mxfp4", "broken", "q8_0")]
    mxfp4, broken, q8_0 = measure(cells, CPU, 1e9, rounds=1)
    assert broken.error is not None and broken.step_ms is None
    for found in (mxfp4, q8_0):
        assert found.error is None and found.step_ms is not None and found.first_token_ms is not None
        assert found.floor_ms == pytest.approx(found.bytes_read / 1e6)
    assert mxfp4.bytes_read < q8_0.bytes_read
    (late,) = measure(cells[:1], CPU, None, seconds=-1.0)
    assert "not begun" in str(late.error)


def test_transformers_own_loop_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PLAIN_TOKENS", 2)
    (found,) = measure(choose_cells("tiny", 1, [], [1], 5, plain=True)[:1], CPU, None, rounds=1)
    assert (found.kind, found.error) == ("plain", None) and found.step_ms is not None


def test_a_step_reads_all_but_tokens_and_experts_that_are_not_asked_for() -> None:
    model = build(Cell("tiny", 1, "bf16", 1), CPU)
    total = sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(each.nbytes for name, each in model.named_parameters() if ".experts." in name)
    table = model.get_input_embeddings().weight.nbytes
    assert bytes_of_a_step(model, 1) == total - table - experts + experts * 2 // 8
    assert bytes_of_a_step(model, 1000) == total - table


def test_names_that_are_unknown_are_refused() -> None:
    for given in (("tiny", 1, ["int3"], [1]), ("huge", 1, [], [1]), ("tiny", 0, [], [1])):
        with pytest.raises(BadValue):
            choose_cells(*given)
