"""`amoeba trace` as a user meets it: in Triton's interpreter here, where one program does everything."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")
from amoeba.cli import app
from amoeba.commands.trace import INTERPRETED_SHAPE

KINDS = {"down", "activate", "up", "down_weights", "up_weights", "combine"}


def trace(*words: object):
    return CliRunner().invoke(app, ["trace", *map(str, words)])


def test_a_backward_is_traced_printed_and_written(tmp_path):
    path = tmp_path / "trace.json"
    result = trace("--shape", INTERPRETED_SHAPE, "--out", path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found["kinds"]) == KINDS and found["trace"] == str(path)
    assert found["tasks"] == sum(kind["tasks"] for kind in found["kinds"].values())
    assert found["busy"] + found["waited"] + found["idle"] == pytest.approx(1)
    for words in ("gradPostGEMM", "busy", "waiting at gates", "idle", "ui.perfetto.dev"):
        assert words in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert len(slices) == found["tasks"] and {event["name"] for event in slices} == KINDS
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shape", "3,4"), "five positive integers"),
        (("--dtype", "int8"), "--dtype"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "float64"), "serves bf16, fp16 and fp32"),
    ],
    ids=["shape", "dtype", "device", "a dtype without kernels"],
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(words, said, tmp_path):
    result = trace(*words, "--out", tmp_path / "trace.json")
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = trace("--device", "cpu", "--out", tmp_path / "trace.json")
    assert result.exit_code == 2 and "TRITON_INTERPRET=1" in result.output
    assert not (tmp_path / "trace.json").exists()


def test_a_folder_is_no_file(tmp_path):
    result = trace("--out", tmp_path)
    assert result.exit_code == 2 and "a folder" in result.output


@pytest.mark.gpu
def test_on_a_gpu_each_multiprocessor_is_a_thread_of_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    assert trace("--shape", "1024,256,128,16,4", "--out", path).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    places = {event["tid"] for event in events if event["ph"] == "X"}
    assert 1 < len(places) <= torch.cuda.get_device_properties(0).multi_processor_count
