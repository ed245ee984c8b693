"""What was measured on a GPU is used there, and nothing else: files are looked at before they are trusted."""

import itertools
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from forgetting import forget

from amoeba.commands import doctor_run as doctor
from amoeba.kernels.attention import tile as attention
from amoeba.kernels.decode.configuration import Layer as DecodedLayer
from amoeba.kernels.decode.configuration import candidates as decode_candidates
from amoeba.kernels.tile_sizes import (
    DTYPES,
    Configuration,
    Product,
    Role,
    bucket,
    candidates,
    configuration,
    configuration_on,
    shared_bytes,
    tile_key,
)
from amoeba.system import tuned
from selection import each_value_once, quick

CPU = torch.device("cpu")
PROBLEM: dict[str, Any] = {"rows": 4096, "experts": 8, "reduction": 256, "columns": 512, "dtype": torch.float16}
OURS = configuration("up", Product(**PROBLEM), None)
OTHER = candidates("up", Product(**PROBLEM), None)[3]
KEY = tile_key("up", Product(**PROBLEM))
GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


def keep(configuration: Any = OTHER, key: str = KEY) -> Path:
    return tuned.keep(tuned.gpu_of(CPU), key, {"configuration": tuned.plain(configuration), "ms": 1.0})


def test_what_was_measured_comes_before_our_table():
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OURS != OTHER
    keep()
    forget()
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OTHER


@pytest.mark.parametrize(
    "change", [{"rows": 512}, {"reduction": 512}, {"columns": 256}, {"dtype": torch.bfloat16}], ids=str
)
def test_another_problem_is_not_meant(change):
    keep()
    other = PROBLEM | change
    assert configuration_on(CPU, "up", Product(**other)) == configuration("up", Product(**other), None)


def test_many_rows_are_one_problem_whatever_their_number():
    keep()
    assert configuration_on(CPU, "up", Product(**PROBLEM | {"rows": 100_000, "experts": 32})) == OTHER


def test_nothing_measured_is_used_where_the_user_says_so(monkeypatch):
    keep()
    monkeypatch.setenv("AMOEBA_TUNED", "off")
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OURS
    assert "AMOEBA_TUNED=off" in doctor._tuned({"tuned_configurations": 0})


def test_a_word_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("AMOEBA_TUNED", "no")
    with pytest.raises(ValueError, match=r"AMOEBA_TUNED.*on or off.*'no'"):
        configuration_on(CPU, "up", Product(**PROBLEM))


def test_it_is_said_that_measured_configurations_are_in_use(caplog):
    path = keep()
    with caplog.at_level(logging.INFO, "amoeba"):
        configuration_on(CPU, "up", Product(**PROBLEM))
    assert "1 configurations" in caplog.text and str(path) in caplog.text and "AMOEBA_TUNED=off" in caplog.text
    assert "1 configurations" in doctor._tuned({"tuned_configurations": 1})


def changed(**changes: Any) -> str:
    entry = {"configuration": asdict(OTHER)}
    return json.dumps({"format": 1, "of": tuned.gpu_of(CPU)._asdict(), "found": {KEY: entry}} | changes)


@pytest.mark.parametrize(
    "content",
    [
        "",
        changed()[:-20],
        "\x00" * 100,
        "[]",
        "3",
        "[" * 100_000,
        changed(format=2),
        changed(of={"name": "another", "capability": "8.6", "triton": "3.6.0"}),
        changed(of=None),
        changed(found=[1]),
        changed(found={KEY: 3}),
        json.dumps({"format": 1}),
    ],
    ids=lambda content: content[:12],
)
def test_a_file_that_is_damaged_or_of_another_gpu_is_named_and_ignored(content, caplog):
    path = keep()
    path.write_text(content)
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OURS
    assert f"ignoring {path}: " in caplog.text
    keep()  # and is written anew
    forget()
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OTHER


ILLEGAL = {
    "too much shared memory": asdict(replace(OTHER, num_stages=50)),
    "no power of two": asdict(replace(OTHER, block_m=96)),
    "negative": asdict(replace(OTHER, block_n=-64)),
    "no number": asdict(OTHER) | {"block_k": "64"},
    "more than we know": asdict(OTHER) | {"maxnreg": 32},
    "nothing": {},
    "none": None,
    "a list": [128, 128, 32],
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_a_configuration_that_is_no_candidate_is_named_and_never_launched(what, caplog):
    path = keep(ILLEGAL[what])
    assert configuration_on(CPU, "up", Product(**PROBLEM)) == OURS
    assert f"{path}: {KEY!r} is no configuration of ours" in caplog.text


def test_keeping_one_leaves_the_others():
    keep(key="a")
    path = keep(key="b")
    assert list(json.loads(path.read_text())["found"]) == ["a", "b"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_gpus_and_versions_of_triton_have_files_of_their_own():
    names = {
        tuned.path_of(tuned.Gpu(*about)).name
        for about in itertools.product(("NVIDIA H200", "NVIDIA GeForce RTX 4090"), ("8.9", "9.0"), ("3.6.0", "3.9.0"))
    }
    assert len(names) == 8
    assert "nvidia-geforce-rtx-4090-sm8.9-triton-3.6.0.json" in names


@each_value_once("dtype")
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", get_args(Role))
def test_all_candidates_fit_and_our_own_is_the_first(role, dtype, capability):
    for rows in (8, 200, 1000, 100_000):
        problem = PROBLEM | {"rows": rows, "dtype": dtype}
        found = candidates(role, Product(**problem), capability)
        assert found[0] == configuration(role, Product(**problem), capability)
        assert 3 <= len(found) == len(set(found)) <= 16
        for each in found:
            sizes = each.block_m, each.block_n, each.block_k, each.num_warps
            assert all(size & (size - 1) == 0 and size > 0 for size in sizes)
            in_flight = (each.num_stages - 1) * (each.block_m + each.block_n) * each.block_k * dtype.itemsize
            assert in_flight <= shared_bytes(capability)


@pytest.mark.parametrize("capability", GPUS)
def test_all_ways_to_decode_and_to_attend_fit(capability):
    for tokens, itemsize in itertools.product((1, 8, 64), (2, 4)):
        layer = DecodedLayer(tokens, 8, 64, 2048, 1024, gated=True, itemsize=itemsize)
        found = decode_candidates(layer, capability)
        assert 2 <= len(found) == len(set(found)) <= 16
    for kernel, size in itertools.product(attention.KERNELS, attention.HEAD_SIZES):
        assert len(attention.candidates(kernel, size, torch.float16, capability)) >= 3


@quick(lambda dtype: dtype == torch.float16)
@pytest.mark.parametrize("role", get_args(Role))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_finding_is_a_candidate_for_all_that_share_the_search(role, dtype):
    """Else a measured choice, ours among them, would be refused for another batch of the same kind."""
    for capability in GPUS:
        lists = dict[int, set]()
        for rows in (*range(1, 66), *range(66, 600, 7)):
            problem = PROBLEM | {"rows": rows, "experts": 1, "dtype": dtype}
            found = set(candidates(role, Product(**problem), capability))
            assert lists.setdefault(bucket(Product(**problem)), found) == found


def test_a_tile_is_a_candidate_where_its_buffers_fit() -> None:
    """Two of three stages, and steps of 64 for LoRA factors: 128 KB of fp32, for which Ada has no room."""
    sizes = {"rows": 64 * 2000, "experts": 64, "reduction": 2048, "columns": 2048, "dtype": torch.float32}
    large = Configuration(128, 128, 16, 8, 8, 3)
    listed = [large in candidates("up", Product(**sizes), each) for each in ((8, 0), (8, 9), (12, 0))]
    assert listed == [True, False, False]
