"""README's chart and table are those that benchmarks/draw_chart.py makes of the documents in benchmarks/results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def draw_chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_chart", ROOT / "benchmarks" / "draw_chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_the_chart_and_the_table_of_the_documents(draw_chart: ModuleType) -> None:
    assert draw_chart.CHART.read_text() == draw_chart.chart(), "run python benchmarks/draw_chart.py"
    readme = draw_chart.README.read_text()
    assert readme == draw_chart.with_table(readme), "run python benchmarks/draw_chart.py"


def test_a_bar_needs_a_measurement_that_passed_its_check(draw_chart: ModuleType) -> None:
    bars = draw_chart.RIGHT[0].groups[0]
    assert draw_chart.measured(bars, "kt-kernel")["status"] == "timed"
    refused = bars._replace(shown={"transformers": "transformers grouped_mm"})  # takes no LoRA factors
    with pytest.raises(KeyError, match="transformers grouped_mm on lora_qwen3_512"):
        draw_chart.measured(refused, "transformers")
