"""What `amoeba bench` has beside bf16: experts in eight and four bits, and the recipes that train."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amoeba.bench import implementations as implementations_module
from amoeba.bench.implementations import implementations, names_of_ours
from amoeba.bench.workload import SHAPES, Shape, make_workload

SHAPE = Shape("few", 3, 64, 32, 4, 2, forward_only=True)
CODES = ["fp8-weights", "mxfp4-weights", "nvfp4-weights"]


def test_experts_are_quantised_once_for_all_the_steps_of_a_graph() -> None:
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=False, peers=[], ours=CODES)
    assert [each.name for each in found] == [f"amoeba {name}" for name in CODES]
    assert "amoeba mxfp8-weights" in left_out
    first = dict(workload.placed)
    shifted = replace(workload, expert_TK=(workload.expert_TK + 1) % SHAPE.experts)
    again, _ = implementations(shifted, training=False, peers=[], ours=CODES)
    assert shifted.placed == first and set(first) == set(CODES)
    assert not torch.equal(again[0].run(), found[0].run()), "of other experts"


def test_bytes_that_codes_are_read_in_count_their_scales() -> None:
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, _ = implementations(workload, training=False, peers=[], ours=CODES)
    assert [each.itemsize for each in found] == [1 + 4 / 128**2, 0.5 + 1 / 32, 0.5 + 1 / 16]


def test_each_recipe_has_a_row_with_codes_kept_and_one_that_computes_h_again() -> None:
    for recipe in ("fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4"):
        assert {recipe, f"{recipe}, weights unchanged", f"{recipe}, h recomputed"} <= set(names_of_ours())


def test_rows_in_e4m3_are_timed_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fp8-weights`, with the products of the kernels for Hopper."""
    workload = make_workload(SHAPE, torch.device("cpu"), torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=False, peers=[], ours=["w8a8"])
    assert not found and "is plain torch here" in left_out["amoeba w8a8"]
    monkeypatch.setattr(implementations_module.fp8_triton, "why_not_on", lambda *given: None)
    found, _ = implementations(workload, training=False, peers=[], ours=["w8a8", "fp8-weights"])
    w8a8 = next(each for each in found if each.name == "amoeba w8a8")
    assert workload.placed["w8a8"].products == "w8a8" and w8a8.itemsize == 1 + 4 / 128**2
    with torch.no_grad():
        y, plain = w8a8.run(), next(each for each in found if each is not w8a8).run()
    assert 0.01 < float((y - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(
    ("device", "forward_only", "training", "ours", "measured"),
    [
        ("cuda", False, False, ["w8a8"], True),
        ("cuda", True, False, None, True),
        ("cuda", False, False, None, False),
        ("cuda", False, False, ["triton", "fp8"], False),
        ("cuda", False, False, ["triton", "mxfp4-weights"], True),
        ("cuda", False, False, ["fp8-weights by eager"], False),
        ("cuda", False, True, ["mxfp4-weights"], False),
        ("cpu", False, False, None, True),
    ],
)
def test_codes_are_measured_with_many_tokens_on_a_gpu_where_they_are_asked_for(
    device: str, forward_only: bool, training: bool, ours: list[str] | None, measured: bool, monkeypatch
) -> None:
    """They are frozen, so a step without LoRA factors is nothing that they could do."""
    asked: list[Any] = []
    for name in ("_our_backends", "_in_fp8", "_transformers_ways", "fused_peers", "_by_other_backends", "_in_fp32"):
        monkeypatch.setattr(implementations_module, name, lambda *given: ([], {}))
    monkeypatch.setattr(implementations_module, "_elsewhere", lambda *given: asked.append(given[1]) or ([], {}))
    shape = replace(SHAPE, tokens=8192, forward_only=forward_only)
    workload: Any = SimpleNamespace(shape=shape, device=torch.device(device), dtype=torch.bfloat16, lora=None)
    implementations(workload, training=training, ours=ours)
    assert asked == ([ours] if measured else [])
    workload.dtype = torch.float16
    implementations(workload, training=training, ours=ours)
    assert len(asked) == measured, "codes become numbers of bf16 alone"


def test_layers_with_factors_that_train_beside_codes_have_sizes_of_models() -> None:
    sizes = {name: SHAPES[name] for name in ("lora_qwen3_8192", "lora_gpt_oss_4096")}
    assert {
        name: (shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.rank)
        for name, shape in sizes.items()
    } == {"lora_qwen3_8192": (8192, 2048, 768, 128, 8, 16), "lora_gpt_oss_4096": (4096, 2880, 2880, 32, 4, 16)}
    assert not any(shape.forward_only for shape in sizes.values())
