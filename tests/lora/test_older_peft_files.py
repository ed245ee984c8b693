"""Adapters that older versions of PEFT and transformers wrote: A and B in each other's place, one LoRA per expert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import (
    ALPHA,
    BOTH,
    MODELS,
    RANK,
    TARGETS,
    V4_NAMES,
    assert_same_factors,
    change_config,
    change_tensors,
    layouts,
    make_adapter,
    make_v4_adapter,
    merged_logits,
    peft_logits,
)
from torch import Tensor

from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.lora.factors import LoraFactors
from amoeba.lora.peft_files import Adapter, read_adapter, write_adapter
from selection import each_value_once, quick
from tiny_models import EXPERTS, TOLERANCE, relative

pytestmark = pytest.mark.filterwarnings("ignore")
OLD_PEFT = os.environ.get("AMOEBA_OLD_PEFT")  # a folder: pip install --no-deps --target FOLDER 'peft==0.18.*'


def swap(tensors: dict[str, Tensor], experts: int = EXPERTS) -> dict[str, Tensor]:
    """What PEFT 0.18 would have written for the same update of weights stored as (E, out, in)."""
    swapped = dict(tensors)
    for key, a in tensors.items():
        if ".experts." in key and key.endswith("lora_A.weight"):
            other = key.replace("lora_A", "lora_B")
            b = tensors[other]
            swapped[key] = b.reshape(b.shape[0], -1, experts).permute(2, 1, 0).reshape(-1, b.shape[0])
            swapped[other] = a.reshape(experts, -1, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    return swapped


@each_value_once()
@quick(lambda version, targets, with_model: with_model == (version is None) or targets == next(iter(TARGETS)))
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("version", ["0.18.1", None, "0.18.2.dev0@main"])
def test_files_with_a_and_b_in_each_others_place(tmp_path: Path, version: Any, targets: str, with_model: bool) -> None:
    make_adapter(tmp_path, "qwen3_moe", TARGETS[targets])
    expected = read_adapter(tmp_path, layouts("qwen3_moe"))
    change_tensors(tmp_path, swap)
    change_config(tmp_path, peft_version=version)
    found = read_adapter(tmp_path, layouts("qwen3_moe") if with_model else None)
    assert_same_factors(found, expected)
    write_adapter(tmp_path, found)
    assert_same_factors(read_adapter(tmp_path), expected)


def test_shapes_are_believed_before_versions(tmp_path: Path) -> None:
    make_adapter(tmp_path, "gpt_oss", BOTH)
    expected = read_adapter(tmp_path, layouts("gpt_oss"))
    change_config(tmp_path, peft_version="0.18.1")  # which left (E, in, out) as it was
    assert_same_factors(read_adapter(tmp_path, layouts("gpt_oss")), expected)


@pytest.mark.parametrize(
    ("version", "transposed", "swapped"), [("0.18.0", False, True), ("0.18.0", True, False), ("0.19.0", False, False)]
)
def test_square_weights_go_by_the_version(tmp_path: Path, version: str, transposed: bool, swapped: bool) -> None:
    factors = LoraFactors(up_lora_a=torch.randn(2, 3, 8), up_lora_b=torch.randn(2, 8, 3))
    write_adapter(tmp_path, Adapter({"m.experts": factors}, gated=False))
    if swapped:
        change_tensors(tmp_path, lambda tensors: swap(tensors, 2))
    change_config(tmp_path, peft_version=version)
    found = read_adapter(tmp_path, {"m.experts": ExpertsLayout(2, 8, 8, gated=False, transposed=transposed)})
    assert torch.equal(found.experts["m.experts"].up_lora_a, factors.up_lora_a)
    assert torch.equal(found.experts["m.experts"].up_lora_b, factors.up_lora_b)


@pytest.mark.skipif(OLD_PEFT is None, reason="needs AMOEBA_OLD_PEFT, the folder of another peft, 0.18 or later")
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", MODELS)
def test_files_that_an_older_peft_made(tmp_path: Path, model_type: str, targets: str) -> None:
    tests = Path(__file__).parent
    program = f"""
import sys
sys.path[:0] = [{OLD_PEFT!r}, {str(tests)!r}, {str(tests.parent / "support")!r}]  # before the newer one
import torch, peft
assert peft.__file__.startswith({OLD_PEFT!r}), peft.__file__
from peft_adapters import make_adapter
from pathlib import Path
torch.save(make_adapter(Path({str(tmp_path)!r}), {model_type!r}, {TARGETS[targets]!r}), {str(tmp_path / "logits")!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    adapter = read_adapter(tmp_path, layouts(model_type))
    expected = torch.load(tmp_path / "logits")
    assert relative(merged_logits(model_type, adapter), expected) < TOLERANCE
    write_adapter(tmp_path, adapter)
    assert relative(peft_logits(tmp_path, model_type), expected) < TOLERANCE


@pytest.mark.parametrize("model_type", V4_NAMES)
def test_one_lora_per_expert_as_in_transformers_4(tmp_path: Path, model_type: str) -> None:
    expected = make_v4_adapter(tmp_path / "v4", model_type, {"gate": RANK, "up": RANK, "down": RANK})
    adapter = read_adapter(tmp_path / "v4", layouts(model_type))
    assert_same_factors(adapter, expected)
    assert_same_factors(read_adapter(tmp_path / "v4"), expected)
    write_adapter(tmp_path / "ours", adapter)
    logits = peft_logits(tmp_path / "v4", model_type)  # PEFT converts them itself
    assert relative(merged_logits(model_type, adapter), logits) < TOLERANCE
    assert torch.equal(peft_logits(tmp_path / "ours", model_type), logits)


def test_per_expert_files_that_peft_no_longer_loads(tmp_path: Path) -> None:
    """Dropout, and gate without up: PEFT 0.21 refuses both on stacked experts."""
    make_v4_adapter(tmp_path, "qwen3_moe", {"gate": RANK, "down": RANK}, lora_dropout=0.1)
    adapter = read_adapter(tmp_path, layouts("qwen3_moe"))
    write_adapter(tmp_path, adapter)
    assert relative(peft_logits(tmp_path, "qwen3_moe"), merged_logits("qwen3_moe", adapter)) < TOLERANCE


def test_scaling_of_single_experts_moves_into_b(tmp_path: Path) -> None:
    pattern = {"experts.2.down_proj": 2 * ALPHA}
    expected = make_v4_adapter(tmp_path, "qwen3_moe", {"gate": RANK, "down": RANK}, alpha_pattern=pattern)
    for factors in expected.experts.values():
        factors.down_lora_b[2] *= 2
    assert_same_factors(read_adapter(tmp_path), expected)
