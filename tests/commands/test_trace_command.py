"""`amoeba trace` as a user meets it: in Triton's interpreter here, where one program does everything."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from amoeba.commands.trace import INTERPRETED_SHAPE
from called import Called, call

KINDS = {"down", "activate", "up", "down_weights", "up_weights", "combine"}


def trace(*words: object, **options: Any) -> Called:
    return call("trace", *words, **options)


def test_a_backward_is_traced_printed_and_written(tmp_path):
    path = tmp_path / "trace.json"
    result = trace("--shape", INTERPRETED_SHAPE, "--out", path, "--json")
    found = result.document
    assert set(found["kinds"]) == KINDS and found["trace"] == str(path)
    assert found["tasks"] == sum(kind["tasks"] for kind in found["kinds"].values())
    assert found["busy"] + found["waited"] + found["idle"] == pytest.approx(1)
    for words in ("down_weights", "busy", "waiting at gates", "idle", "ui.perfetto.dev"):
        assert words in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert len(slices) == found["tasks"] and {event["name"] for event in slices} == KINDS
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) > 0
    assert found["picture"] == str(tmp_path / "trace.svg") and found["tensor_cores"] is None
    assert "T=40 H=16 I=24 E=3 K=2, float32, in Triton&#x27;s interpreter" in (tmp_path / "trace.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shape", "3,4"), "five positive integers"),
        (("--dtype", "int8"), "--dtype"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "float64"), "supports bf16, fp16 and fp32"),
    ],
    ids=["shape", "dtype", "device", "a dtype without kernels"],
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(words, said, tmp_path):
    result = trace(*words, "--out", tmp_path / "trace.json", code=2)
    assert said in result.output and "Traceback" not in result.output


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = trace("--device", "cpu", "--out", tmp_path / "trace.json", code=2)
    assert "TRITON_INTERPRET=1" in result.output
    assert not (tmp_path / "trace.json").exists()


def test_a_folder_is_no_file_and_one_file_is_not_two(tmp_path):
    for words in (("--out", tmp_path), ("--out", tmp_path / "trace.json", "--picture", tmp_path)):
        result = trace(*words, code=2)
        assert "a folder" in result.output
    assert "a file other than --out" in trace("--out", tmp_path / "trace.svg", code=2).output


@pytest.mark.gpu
def test_on_a_gpu_each_multiprocessor_is_a_thread_of_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    result = trace("--shape", "1024,256,128,16,4", "--out", path)
    assert "tensor cores: " in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    places = {event["tid"] for event in events if event["ph"] == "X"}
    assert 1 < len(places) <= torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shape", "0,16,24,3,2"), "five positive integers"),
        (("--shape", "40,16,24,3,9"), "K at most E"),
        (("--shape", "40,999999,999999,999,2"), "--shape: expected one"),
        (("--seed", -1), "--seed: expected 0 <= seed"),
        (("--seed", 10**23), "--seed: expected 0 <= seed"),
        (("--out", "FOLDER"), "--out: expected the name of a file; got"),
        (("--out", "/dev/null"), "a device"),
        (("--out", "FILE/trace.json"), "is a file"),
        (("--picture", "FILE/trace.svg"), "--picture: expected a file in a folder"),
        (("--out", "FOLDER/a.svg"), "--picture: expected a file other than --out"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_anything_is_computed(words, said, tmp_path, monkeypatch):
    monkeypatch.setattr("amoeba.commands.trace._trace", lambda *_: pytest.fail("it was computed"))
    (tmp_path / "file").write_text("kept")
    option, value = words
    value = str(value).replace("FOLDER", str(tmp_path)).replace("FILE", str(tmp_path / "file"))
    result = trace("--shape", INTERPRETED_SHAPE, "--out", tmp_path / "trace.json", option, value, code=2)
    assert said in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"
