"""The script that measures streaming over a slow link."""

import json
from ctypes import CFUNCTYPE, c_int, c_uint64
from pathlib import Path

import pytest
import torch

from benchmarks.slow_link import Cap, main


def test_a_capped_copy_moves_as_many_more_bytes_as_it_is_slower(tmp_path: Path) -> None:
    calls: list[tuple[int, ...]] = []
    code = 0

    @CFUNCTYPE(c_int, *[c_uint64] * 4)
    def copy(*given: int) -> int:
        calls.append(given)
        return code

    cap = Cap(tmp_path)
    cap.over(copy)
    for times, sizes in ((1.0, [1000]), (2.5, [1000, 1000, 500]), (0.5, [1000])):
        cap.slow_down(times)
        assert cap.copy(1, 2, 1000, 3) == 0
        assert calls == [(1, 2, size, 3) for size in sizes]
        calls.clear()
    cap.slow_down(4)
    code = 700
    assert cap.copy(1, 2, 1000, 3) == 700 and len(calls) == 1


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="tiny sizes say nothing there")
def test_it_runs_and_its_last_line_is_json(capsys) -> None:
    document = main(["--tiny"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document
    assert document["tokens_per_second"]["move"]["as it is"] > 0
