"""`python -m benchmarks products`: kernels one by one, and which of them get a time."""

import json
from pathlib import Path

import pytest
import torch

from amoeba.bench.timing import Ceilings, Product
from amoeba.bench.workload import SHAPES, parse_shape
from amoeba.commands.output import Output
from benchmarks import products
from benchmarks.__main__ import app
from benchmarks.products import Role, roles_of
from called import call

CPU = torch.device("cpu")


def _raise() -> None:
    raise NotImplementedError("not on this device\nsecond line")


def some_roles() -> list[Role]:
    one, out = torch.ones(4, 4), torch.zeros(4, 4)
    return [
        Role("up", lambda: one * 1.001, flops=2e9, expected=one),
        Role("down", lambda: one * 1.2, flops=1e9, expected=one),
        Role("codes of all weights", lambda: out.copy_(one), bytes=1e6, expected=one, result=lambda: out),
        Role("dx, torch fp8 (rowwise)", _raise, flops=1e9),
        Role("dx", _raise, flops=1e9),
    ]


def test_only_what_is_right_gets_a_time_and_a_rate() -> None:
    report = products.run_products(SHAPES["small"], some_roles(), CPU, repeats=2)
    up, down, codes, theirs, dx = report.measurements
    assert up.median_ms and up.flops_per_second == pytest.approx(2e9 / up.median_ms * 1e3) and up.error
    assert codes.bytes_per_second and codes.flops_per_second is None
    assert down.median_ms is None and "off by 2.0e-01" in (down.reason or "")
    assert theirs.reason == dx.reason == "NotImplementedError: not on this device second line"
    assert report.wrong == ["down", "dx"], "torch may lack a product, we may not"


def test_each_shape_is_written_down_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    path, shapes = tmp_path / "found.json", [SHAPES["small"], parse_shape("8,16,8,4,2")]
    limits = Ceilings("cpu", {"float32": Product(256, 1e12), "bfloat16": Product(256, 1e12)}, 1 << 20, 1e10)
    seen: list[int] = []

    def roles(shape, device) -> list[Role]:
        seen.append(len(json.loads(path.read_text())["products"]) if path.exists() else 0)
        return some_roles()

    document, ok = products.run(shapes, CPU, 1, path, Output(), ["u"], roles, lambda *_: limits)
    assert ok and seen == [0, 1] and json.loads(path.read_text()) == document
    assert document["finished"] and document["products"][1]["shape"]["name"] == "8,16,8,4,2"
    assert document["command"] == "python -m benchmarks products --shape small --shape 8,16,8,4,2 --ours u --repeats 1"


def test_kernels_are_chosen_by_parts_of_their_names() -> None:
    found = products.chosen(some_roles(), ["torch", "up"])
    assert [role.name for role in found] == ["up", "dx, torch fp8 (rowwise)"]
    assert len(products.chosen(some_roles(), [])) == 5
    with pytest.raises(ValueError, match=r"a part of one of these names: up; down; .* got fp4"):
        products.chosen(some_roles(), ["fp4"])


def test_it_is_for_a_gpu() -> None:
    result = call("products", "--device", "cpu", code=2, app=app)
    assert "expected a CUDA device; got cpu" in result.said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", ["300,256,192,4,2", "300,256,256,4,2"])
def test_on_a_gpu_all_kernels_of_a_layer_are_right(text: str) -> None:
    shape, device = parse_shape(text), torch.device("cuda")
    report = products.run_products(shape, roles_of(shape, device), device, repeats=1)
    assert not report.wrong, report
