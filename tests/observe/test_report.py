"""`amoeba report`: a run folder read back, and its page, also as a real browser shows it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from headless_chromium import NAMES, Chromium, find_chromium

from amoeba.commands import report as report_command
from amoeba.commands.output import Output
from amoeba.observe import report
from amoeba.observe.report import page, write_report
from amoeba.observe.run_log import read_run
from selection import quick

ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
LAYERS, EXPERTS, TOP_K, STEPS, EVERY = 4, 16, 2, 300, 5
TOKENS = 4096


def train_line(step: int, loss: float | None = 5.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "time": 0.5 * step,
        "loss": loss,
        "lr": 1e-3,
        "tokens": TOKENS * step,
        **more,
    }


def metrics() -> Iterator[dict[str, Any]]:
    """300 steps in which the loss falls, a lopsided start evens out, and one expert stays dead for a while."""
    chance = random.Random(7)
    bias = [[chance.gauss(0, 1.1) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    for step in range(EVERY, STEPS + 1, EVERY):
        calm = 0.25 + 0.75 * math.exp(-step / 90)
        layers = []
        for layer in range(LAYERS):
            weights = [math.exp(calm * value + chance.gauss(0, 0.08)) for value in bias[layer]]
            load = [round(TOKENS * TOP_K * weight / sum(weights)) for weight in weights]
            if layer == 2 and step < 120:
                load[11] = 0
            layers.append(
                {
                    "layer": layer,
                    "load": load,
                    "entropy": math.log(EXPERTS)
                    - 0.25 * (layer + 1) * (1 - math.exp(-step / 120))
                    - chance.random() / 30,
                    "max_violation": max(load) / (sum(load) / EXPERTS) - 1,
                    "dead_experts": load.count(0),
                    "drop_rate": 0.0,
                }
            )
        yield {"kind": "router", "step": step, "layers": layers}
        yield train_line(
            step,
            loss=4.0 + 3.6 * math.exp(-step / 70) + chance.gauss(0, 0.06),
            lr=3e-4 * min(1, step / 30) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS)),
            grad_norm=0.6 + 2 * math.exp(-step / 40) + chance.random() * 0.2,
            tokens_per_second=8200 + chance.gauss(0, 220),
            memory_bytes=1_310_000_000 + 400_000 * step,
            max_violation=max(layer["max_violation"] for layer in layers),
            dead_experts=sum(layer["dead_experts"] for layer in layers),
            drop_rate=0.0,
        )
        if step % 50 == 0:
            loss = 4.1 + 3.5 * math.exp(-step / 70)
            yield {"kind": "eval", "step": step, "time": 0.5 * step, "loss": loss, "perplexity": math.exp(loss)}
    together = []
    for layer in range(LAYERS):
        counts = [[0] * EXPERTS for _ in range(EXPERTS)]
        for one in range(EXPERTS):
            for other in range(one):
                near = 3.0 if (one - other) % (layer + 2) == 0 else 1.0
                counts[one][other] = counts[other][one] = round(60 * near * math.exp(chance.gauss(0, 0.4)))
            counts[one][one] = 0
        for one in range(EXPERTS):
            counts[one][one] = sum(counts[one])
        together.append({"layer": layer, "counts": counts})
    yield {"kind": "coactivation", "step": STEPS, "layers": together}
    yield {"kind": "final", "step": STEPS, "loss": 4.15, "perplexity": 63.4, "start_loss": 7.62, "seconds": 154.0}


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "hidden": 256}
    config = {
        "preset": "small",
        "model": model,
        "steps": STEPS,
        "learning_rate": 3e-4,
        "seed": 12345,
        "data": ["a", "b"],
    }
    environment = {
        "date": "2026-03-01T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": {
            "system": "Linux",
            "cpu": {"model": "Some CPU", "cores": 8},
            "memory_bytes": 16 * 2**30,
            "gpus": [],
        },
        "versions": {"torch": "2.10.0", "transformers": None},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps(environment))
    text = "".join(json.dumps(line) + "\n" for line in (metrics() if lines is None else lines))
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small-moe")


def data_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', html, flags=re.DOTALL)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(found, parse_constant=refuse)


# ---- reading ----


def test_a_whole_run_is_read(whole_run):
    run = read_run(whole_run)
    assert run.finished and run.torn_line is None and run.last_step == STEPS
    assert [record["step"] for record in run.train] == list(range(EVERY, STEPS + 1, EVERY))
    assert len(run.eval) == 6 and len(run.router) == 60 and len(run.coactivation) == 1
    assert run.config["model"]["experts"] == EXPERTS


@pytest.mark.parametrize("tail", ['{"kind": "train", "st', '{"kind": "train", "st\n', '{"kind": "train", "x": "\xe9'])
def test_a_torn_last_line_is_left_out_and_said(tmp_path, tail):
    run = read_run(write_run(tmp_path, [train_line(1), train_line(2)], tail))
    assert run.torn_line == 3 and run.last_step == 2 and not run.finished
    assert any("Line 3 of metrics.jsonl, the last one, is incomplete" in note for note in data_of(page(run))["notes"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{torn", "a JSON object"),
        ("[1]", "a JSON object; got a list"),
        ('{"step": 3}', '"kind", one of train'),
        ('{"kind": "train", "step": "3"}', '"step", a whole number'),
        ('{"kind": "train", "step": -1}', '"step", a whole number'),
        ('{"kind": "router", "step": 3}', '"layers", a list'),
        ('{"kind": "router", "step": 3, "layers": [{"layer": 0, "load": "many"}]}', '"load" of numbers in layer 0'),
        ('{"kind": "router", "step": 3, "layers": [{"load": [1]}]}', '"layer", a whole number'),
        (
            '{"kind": "coactivation", "step": 3, "layers": [{"layer": 1, "counts": [[1, 2]]}]}',
            'square "counts" in layer 1',
        ),
    ],
)
def test_a_bad_line_in_the_middle_is_named(tmp_path, line, expected):
    folder = write_run(tmp_path, [train_line(1)], f"{line}\n{json.dumps(train_line(3))}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected .*; got .*\. Remove the line") as error:
        read_run(folder)
    assert expected in str(error.value)


def test_no_folder_a_file_and_a_folder_that_is_no_run_say_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="expected the folder of a training run; got nothing there"):
        read_run(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="got a file"):
        read_run(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"expected a training run .*; got a folder with notes\.txt\. Give"):
        read_run(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    folder = write_run(tmp_path, [])
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object"):
        read_run(folder)


def test_a_run_that_went_back_has_each_step_once(tmp_path):
    lines = [train_line(step, loss=1.0) for step in (10, 20, 30)] + [train_line(step, loss=2.0) for step in (20, 25)]
    run = read_run(write_run(tmp_path, lines))
    assert [(record["step"], record["loss"]) for record in run.train] == [(10, 1.0), (20, 2.0), (25, 2.0)]
    assert run.went_back_to == (20,)
    assert any("went back to step 20" in note for note in data_of(page(run))["notes"])


def test_a_run_that_goes_on_after_its_final_line_is_not_finished(tmp_path):
    final = {"kind": "final", "step": 2, "loss": 1.0}
    assert read_run(write_run(tmp_path, [train_line(2), final])).finished
    assert not read_run(write_run(tmp_path, [train_line(2), final, train_line(3)])).finished


def test_lines_of_unknown_kinds_are_counted_not_hidden(tmp_path):
    run = read_run(write_run(tmp_path, [train_line(1), {"kind": "weather"}, {"kind": "weather"}]))
    assert run.unknown_kinds == {"weather": 2}
    assert any("2 lines of kind 'weather'" in note for note in data_of(page(run))["notes"])


# ---- the page as text ----


def test_the_page_is_written_whole_into_the_run(whole_run, tmp_path):
    path = write_report(whole_run)
    assert path == whole_run / "report.html"
    data = data_of(path.read_text())
    assert data["name"] == "small-moe" and data["finished"] and len(data["router"]) == 60
    elsewhere = write_report(whole_run, tmp_path / "new" / "page.html")
    assert elsewhere.is_file() and os.stat(elsewhere).st_mode & 0o777 == 0o644
    assert sorted(entry.name for entry in elsewhere.parent.iterdir()) == ["page.html"]
    with pytest.raises(ValueError, match="expected the name of a file; got a folder"):
        write_report(whole_run, tmp_path)


def test_a_failed_write_leaves_the_earlier_page(whole_run, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("earlier")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(whole_run, path)
    assert path.read_text() == "earlier" and len(list(tmp_path.iterdir())) == 1


def test_the_page_refers_to_nothing_outside_itself(whole_run):
    html = page(read_run(whole_run))
    addresses = re.findall(r"[a-z]+://[^\s\"'`<>)]+", html)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, addresses
    assert not re.search(r"<link|<img|<iframe|\bsrc=|@import|url\(|\bfetch\(|XMLHttpRequest", html)
    assert "default-src 'none'" in html


def test_not_finite_values_become_words(tmp_path):
    lines = [train_line(step, loss) for step, loss in enumerate((math.nan, math.inf, -math.inf, None))]
    data = data_of(page(read_run(write_run(tmp_path, [*lines, {"kind": "final", "step": 4, "loss": None}]))))
    words = ["not finite (nan)", "not finite (inf)", "not finite (-inf)", "not finite"]
    assert [record["loss"] for record in data["train"]] == words and data["final"]["loss"] == "not finite"


def test_names_cannot_break_out_of_the_data(tmp_path):
    folder = write_run(tmp_path, [train_line(1)])
    nasty = "</script><script>alert(1)</script><!--"
    (folder / "config.json").write_text(json.dumps({"name": nasty, "placeholder": "__RUN__"}))
    html = page(read_run(folder))
    assert nasty not in html and html.count("</script>") == 2
    assert data_of(html)["config"] == {"name": nasty, "placeholder": "__RUN__"}


def test_long_runs_are_thinned_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_LINE_RECORDS", 7)
    monkeypatch.setattr(report, "_LOAD_VALUES", 9 * EXPERTS)
    layers = [{"layer": 0, "load": [1] * EXPERTS}]
    lines = [
        line for step in range(101) for line in (train_line(step), {"kind": "router", "step": step, "layers": layers})
    ]
    data = data_of(page(read_run(write_run(tmp_path, lines))))
    for kind, count in (("train", 7), ("router", 9)):
        steps = [record["step"] for record in data[kind]]
        assert len(steps) == count and steps[0] == 0 and steps[-1] == 100 and steps == sorted(set(steps))
        assert any(f"{count} of the 101 {kind} lines are shown" in note for note in data["notes"])


def test_the_command_says_where_the_page_is(whole_run, tmp_path, capsys):
    path = tmp_path / "page.html"
    document = report_command.run(whole_run, path, Output())
    assert document["report"] == str(path) and document["bytes"] == path.stat().st_size > 10_000
    assert path.as_uri() in capsys.readouterr().out


# ---- the page in a browser ----

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed"
)
TITLES = ("Loss", "Expert load", "Router entropy", "MaxVio", "Co-activation", "Dead experts", "Final evaluation")
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


def test_the_last_line_is_about_the_steps_since_the_one_before(tmp_path):
    for steps, expected in (([], 0), ([7], 7), ([10, 20, 25], 5)):
        run = read_run(write_run(tmp_path / str(expected), [train_line(step) for step in steps]))
        assert report.page_data(run)["last_line_steps"] == expected


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
    chromium.screenshot(ARTIFACTS / f"report-{name.replace(' ', '-')}.png")
    assert chromium.problems == []
    text = text_of(chromium)
    for words in [*expected, "This run has no environment.json."]:
        assert words in text
    assert not re.search(r"\b(NaN|undefined|null|Infinity)\b", text)
