"""The chart in README.md and the table in docs/benchmarks.md follow from the documents in benchmarks/results."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def draw_chart() -> ModuleType:
    return script("draw_chart")


def test_chart_and_table_are_those_of_the_documents(draw_chart: ModuleType) -> None:
    assert draw_chart.CHART.read_text() == draw_chart.chart(), "run python benchmarks/draw_chart.py"
    page = draw_chart.PAGE.read_text()
    assert page == draw_chart.with_table(page), "run python benchmarks/draw_chart.py"


def test_a_bar_needs_a_measurement_that_passed_its_check(draw_chart: ModuleType) -> None:
    bars = draw_chart.RIGHT[0].groups[0]
    assert draw_chart.measured(bars, "kt-kernel")["status"] == "timed"
    refused = bars._replace(shown={"transformers": "transformers grouped_mm"})  # takes no LoRA factors
    with pytest.raises(KeyError, match="transformers grouped_mm on lora_qwen3_512"):
        draw_chart.measured(refused, "transformers")


def test_losses_are_drawn_with_their_differences() -> None:
    """A run that was cut off has fewer of them."""
    runs = {"bf16": [[0, 9.0], [100, 5.0], [200, 4.0]], "fp8": [[0, 9.0], [100, 5.1]]}
    document = {"model": "120m", "tokens_per_step": 8192, "runs": runs}
    again = document | {"runs": runs | {"bf16 again": [[0, 9.0], [100, 5.2]]}}
    drawn = script("draw_losses").chart([document, again])
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    curves = [each.attrib["points"].split() for each in root.iter(f"{space}polyline")]
    assert [len(points) for points in curves] == [2, 1, 2, 1] and len(list(root.iter(f"{space}circle"))) == 3
    assert "ends +27.50, +27.50 % from bf16 with 8192 tokens a step" in drawn and "+4.0 %" in drawn
