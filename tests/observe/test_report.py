"""`amoeba report`: a run folder read back, and its page as text."""

import json
import math
import os
import re
from typing import Any

import pytest
from recorded_runs import EVERY, EXPERTS, STEPS, train_line, write_run

from amoeba.observe import report
from amoeba.observe.report import page, write_report
from amoeba.observe.run_log import read_run
from called import call


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
        (
            '{"kind": "text_kinds", "step": 3, "kinds": ["a"], "layers": [{"layer": 1, "loads": [[1, 2], [3, 4]]}]}',
            '"kinds", a name for each of the 2 rows of "loads" in layer 1',
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


def test_the_command_says_where_the_page_is(whole_run, tmp_path):
    path = tmp_path / "page.html"
    result = call("report", whole_run, "--out", path, "--json")
    assert result.document["report"] == str(path) and result.document["bytes"] == path.stat().st_size > 10_000
    assert path.as_uri() in result.stdout


def test_the_last_line_is_about_the_steps_since_the_one_before(tmp_path):
    for steps, expected in (([], 0), ([7], 7), ([10, 20, 25], 5)):
        run = read_run(write_run(tmp_path / str(expected), [train_line(step) for step in steps]))
        assert report.page_data(run)["last_line_steps"] == expected
