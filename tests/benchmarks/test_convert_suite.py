"""`python -m benchmarks convert`: a tiny model is converted by every job, and the figures are of its bytes."""

from pathlib import Path

import torch

from benchmarks.convert import ConvertSize, run_convert

TINY = ConvertSize(10**6, experts=4, hidden=128, intermediate=96, vocabulary=300)


def test_every_job_is_timed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    report = run_convert(TINY, tmp_path, rounds=2, device=torch.device("cpu"))
    names = [each.name for each in report.measurements]
    assert names[:5] == ["cp", "cp, synced", "read and write", "pack", "save"] and "quantise nvfp4" in names
    for each in report.measurements:
        assert len(each.seconds) == len(each.cpu_seconds) == 2 and each.gb_per_second > 0
    assert 0.5 * 10**6 < report.model_bytes < 2 * 10**6 and not list(tmp_path.iterdir())


def test_a_model_has_as_many_layers_as_fit() -> None:
    assert ConvertSize(8 * 10**9).layers == 6 and ConvertSize(1).layers == 1
