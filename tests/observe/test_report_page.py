"""The page of `amoeba report` as a real browser shows it."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from headless_chromium import NAMES, Chromium, find_chromium
from recorded_runs import EVERY, LAYERS, metrics, train_line, write_run

from amoeba.observe import report
from amoeba.observe.report import write_report
from selection import each_value_once, quick

ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed"
)
TITLES = (
    "Loss",
    "Expert load",
    "Experts and kinds of text",
    "Router entropy",
    "MaxVio",
    "Co-activation",
    "Dead experts",
    "Final evaluation",
)
TITLES += ("Throughput", "Learning rate", "Gradient norm", "Memory", "Configuration", "Environment")
HEATMAP = "document.getElementById('load').toDataURL()"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Chromium]:
    if find_chromium() is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def text_of(chromium: Chromium) -> str:
    return chromium.evaluate("document.body.innerText")


def centre_of(chromium: Chromium, selector: str) -> list[float]:
    return chromium.evaluate(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )


@needs_chromium
@each_value_once()
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 600])
def test_the_page_shows_everything_without_an_error(chromium, whole_run, width, scheme):
    address = write_report(whole_run).as_uri()
    chromium.open(address, width, scheme=scheme)
    chromium.screenshot(ARTIFACTS / f"report-{width}-{scheme}.png")
    assert chromium.problems == []
    assert chromium.requests == [address]
    assert tuple(chromium.evaluate("[...document.querySelectorAll('h2')].map(title => title.innerText)")) == TITLES
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    text = text_of(chromium)
    for words in ("small-moe", "finished", "63.4", "2 min 34 s", "16 GiB", "top_k", "12345", "cpu.cores", "2.10.0"):
        assert words in text
    for chart in chromium.evaluate(
        "[...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text.x')]"
        ".map(text => { const box = text.getBoundingClientRect(); return [box.left, box.right]; }))"
    ):
        assert len(chart) >= 2
        assert all(left[1] < right[0] for left, right in pairwise(chart)), "labels overlap"


@needs_chromium
def test_a_traced_backward_in_the_folder_is_shown(chromium, whole_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    picture = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><text>"&lt;/script>"</text></svg>'
    (folder / report.TIMELINE).write_text(picture)
    address = write_report(folder).as_uri()
    chromium.open(address, 1200)
    assert chromium.problems == []
    assert all(each == address or each.startswith("data:image/svg+xml,") for each in chromium.requests)
    assert chromium.evaluate("document.querySelector('#timeline').naturalWidth > 0")


@needs_chromium
def test_the_slider_moves_the_heatmap_by_keyboard_and_by_pointer(chromium, whole_run):
    chromium.open(write_report(whole_run).as_uri(), 1200)
    last = chromium.evaluate(HEATMAP)
    step = "document.querySelector('output').innerText"
    assert chromium.evaluate(step) == "step 300"
    chromium.evaluate("document.getElementById('step').focus()")
    chromium.press("Home", 36)
    first = chromium.evaluate(HEATMAP)
    assert chromium.evaluate(step) == "step 5" and first != last
    assert "1 without a row" in text_of(chromium)
    chromium.press("ArrowRight", 39)
    assert chromium.evaluate(step) == "step 10" and chromium.evaluate(HEATMAP) not in (first, last)
    chromium.press("End", 35)
    assert chromium.evaluate(step) == "step 300" and chromium.evaluate(HEATMAP) == last
    assert chromium.evaluate("document.getElementById('step').getAttribute('aria-valuetext')") == "step 300"
    chromium.click(*centre_of(chromium, "#step"))
    assert chromium.evaluate(step) in ("step 150", "step 155") and chromium.evaluate(HEATMAP) not in (first, last)
    assert chromium.problems == []


@needs_chromium
def test_the_layer_of_the_coactivation_can_be_chosen(chromium, whole_run):
    chromium.open(write_report(whole_run).as_uri(), 1200)
    shown = [
        chromium.evaluate(
            f"(() => {{ const choice = document.getElementById('layer'); choice.value = {layer};"
            "choice.dispatchEvent(new Event('change')); return document.getElementById('together').toDataURL(); })()"
        )
        for layer in range(LAYERS)
    ]
    assert len(set(shown)) == LAYERS and chromium.problems == []


@needs_chromium
def test_kinds_of_text_are_shown_per_layer_the_most_special_first(chromium, tmp_path):
    loads = {0: [[5, 5, 5, 5], [4, 6, 5, 5]], 1: [[9, 1, 0, 0], [0, 1, 9, 10]]}
    layers = [{"layer": layer, "loads": rows} for layer, rows in loads.items()]
    line = {"kind": "text_kinds", "step": 1, "kinds": ["code", "prose"], "layers": layers}
    chromium.open(write_report(write_run(tmp_path / "run", [train_line(1), line])).as_uri(), 1200, height=2400)
    assert "Most: expert 0 gets 3.6 × an even share of code." in text_of(chromium)
    x, y = centre_of(chromium, "#kinds")
    chromium.point(x + 40, y - 50)
    shown = chromium.evaluate("document.getElementById('tip').innerText")
    assert re.search(r"code, expert 2\s+0 × an even share\s+0 % of the rows of code", shown), shown
    chromium.evaluate(
        "(() => { const choice = document.getElementById('kinds-layer'); choice.value = 0;"
        "choice.dispatchEvent(new Event('change')); })()"
    )
    assert "Most: expert 1 gets 1.2 × an even share of prose." in text_of(chromium)
    assert chromium.problems == []


@needs_chromium
def test_without_kinds_of_text_there_is_no_such_card(chromium, tmp_path):
    lines = [line for line in metrics() if line["kind"] != "text_kinds"]
    chromium.open(write_report(write_run(tmp_path / "run", lines)).as_uri(), 1200)
    assert "kinds of text" not in text_of(chromium) and chromium.problems == []


@needs_chromium
def test_pointer_and_keys_read_values(chromium, whole_run):
    chromium.open(write_report(whole_run).as_uri(), 1200, height=2400)
    tip = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
    assert chromium.evaluate(tip) is None
    x, y = centre_of(chromium, "svg")
    chromium.point(x + 40, y)
    shown = chromium.evaluate(tip)
    assert re.search(r"step 1[56]\d\s+train 4\.\d+\s+held-out 4\.\d+ at step 150", shown), shown
    chromium.point(1, 1)
    assert chromium.evaluate(tip) is None
    chromium.point(*centre_of(chromium, "#load"))
    shown = chromium.evaluate(tip)
    assert re.search(r"layer \d, expert \d+\s+[\d.]+ × an even share\s+[\d,]+ rows, [\d.]+ % of the layer", shown), (
        shown
    )
    chromium.screenshot(ARTIFACTS / "report-tooltip.png")
    chromium.point(1, 1)
    assert chromium.evaluate(tip) is None
    chromium.evaluate("document.querySelector('svg').focus()")
    chromium.press("End", 35)
    assert "step 300" in chromium.evaluate(tip)
    assert chromium.problems == []


@needs_chromium
def test_a_narrower_window_is_drawn_again(chromium, whole_run):
    chromium.open(write_report(whole_run).as_uri(), 1200)
    chromium.resize(600)
    chromium.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert chromium.evaluate("document.getElementById('load').width") < 600
    assert chromium.evaluate("document.documentElement.scrollWidth") == 600


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_load_map_is_grey_at_an_even_share_blue_below_and_orange_above(chromium, tmp_path, scheme):
    layers = [{"layer": 0, "load": [0, 100, 300, 50, 50]}]
    folder = write_run(tmp_path / "run", [train_line(1), {"kind": "router", "step": 1, "layers": layers}])
    chromium.open(write_report(folder).as_uri(), 1200, scheme=scheme)
    colors = chromium.evaluate(
        "[0, 1, 2, 3].map(at => { const canvas = document.getElementById('load'), left = 37;"
        "const x = left + (at + 0.2) * (canvas.width - left) / 5;"
        "return [...canvas.getContext('2d').getImageData(x, 14, 1, 1).data].slice(0, 3); })"
    )
    none, even, much, half = colors
    assert max(even) - min(even) < 25, "grey"
    assert none[2] > none[0] + 60 and half[2] > half[0] + 25, "blue"
    assert much[0] > much[2] + 60, "orange"
    assert sum(abs(one - other) for one, other in zip(none, even, strict=True)) > sum(
        abs(one - other) for one, other in zip(half, even, strict=True)
    ), "further from even, further from grey"
    assert "Grey is an even share (1), blue is less, orange is more" in text_of(chromium)
    assert chromium.evaluate("document.getElementById('scale').innerText").split() == ["0", "1", "(even)", "3", "×"]


@needs_chromium
def test_what_is_of_the_last_steps_alone_says_so(chromium, whole_run):
    chromium.open(write_report(whole_run).as_uri(), 1200)
    text = text_of(chromium)
    for name in ("train loss", "MaxVio", "dead experts"):
        assert f"{name}, last 5 steps" in text
    assert "latest" not in text


@needs_chromium
def test_a_fine_tuning_page_speaks_of_the_answers(chromium, whole_run, tmp_path):
    folder = write_run(tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"r": 16, "targets": ["experts"]}))
    chromium.open(write_report(folder).as_uri(), 1200)
    text = text_of(chromium)
    for words in ("Loss of the answers", "final held-out loss of the answers", "The prompts do not count"):
        assert words in text
    assert chromium.evaluate("document.title") == "mine · aMoEba fine-tuning run"
    chromium.open(write_report(whole_run).as_uri(), 1200)
    assert "answers" not in text_of(chromium)


AWKWARD: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "empty": ([], ["No training step is recorded yet", "still in progress, or was stopped"]),
    "one step": (
        [line for line in metrics() if line["step"] == EVERY],
        ["in progress or stopped", "the only one recorded", "None yet"],
    ),
    "no router": (
        [line for line in metrics() if line["kind"] in ("train", "eval", "final")],
        ["No router lines in this run", "Not recorded in this run", "finished"],
    ),
    "not finite": (
        [
            train_line(1),
            train_line(2, loss=math.nan),
            train_line(3, loss=math.inf),
            {"kind": "router", "step": 3, "layers": [{"layer": 0, "load": [3, math.nan, 0], "entropy": None}]},
            {"kind": "final", "step": 3, "loss": math.nan, "perplexity": math.inf},
        ],
        ["2 values are not finite", "not finite (nan)", "not finite (inf)"],
    ),
    "interrupted": (
        [train_line(1, share_of_peak=0.25), {"kind": "final", "step": 1, "loss": 4.0, "interrupted": True}],
        ["interrupted", "Share of peak", "train loss, last step"],
    ),
    "no two together": (
        [train_line(1), {"kind": "coactivation", "step": 1, "layers": [{"layer": 7, "counts": [[5, 0], [0, 0]]}]}],
        ["No two experts were ever chosen together"],
    ),
    "idle layer and other sizes": (
        [
            train_line(1),
            {"kind": "router", "step": 1, "layers": [{"layer": 1, "load": [0, 0]}, {"layer": 3, "load": [1, 2, 0, 5]}]},
            {"kind": "router", "step": 2, "layers": [{"layer": 1, "load": []}]},
            {"kind": "router", "step": 3, "layers": []},
        ],
        ["Expert load"],
    ),
    "many": (
        [
            train_line(1),
            *(
                {
                    "kind": "router",
                    "step": step,
                    "layers": [
                        {"layer": layer, "load": [(layer * expert) % 7 for expert in range(128)], "entropy": layer / 48}
                        for layer in range(48)
                    ],
                }
                for step in (1, 2)
            ),
        ],
        ["layer 47"],
    ),
}


@needs_chromium
def test_a_run_in_fp8_says_so_below_its_name(chromium, tmp_path):
    folder = write_run(tmp_path / "fp8")
    environment = json.loads((folder / "environment.json").read_text())
    environment["experts"] = {"precision": "fp8", "backend": "triton, our kernels", "code_bytes": 5}
    (folder / "environment.json").write_text(json.dumps(environment))
    chromium.open(write_report(folder).as_uri(), 1200)
    assert chromium.problems == []
    assert "experts in fp8 by triton, our kernels · run" in text_of(chromium)


@needs_chromium
@quick(lambda name: name != "many")
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_runs_are_shown_for_what_they_are(chromium, tmp_path, name):
    lines, expected = AWKWARD[name]
    folder = write_run(tmp_path / name, lines)
    (folder / "environment.json").unlink()
    chromium.open(write_report(folder).as_uri(), 1200)
    assert chromium.problems == []
    text = text_of(chromium)
    for words in [*expected, "This run has no environment.json."]:
        assert words in text
    assert not re.search(r"\b(NaN|undefined|null|Infinity)\b", text)
