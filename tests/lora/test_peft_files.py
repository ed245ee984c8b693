"""Adapter folders of PEFT: read as PEFT means them, written as PEFT reads them. The truth is the peft package."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft_adapters import (
    ALPHA,
    BOTH,
    EXPERTS_OF_LAYER,
    MODELS,
    RANK,
    TARGETS,
    assert_same_factors,
    change_tensors,
    layouts,
    make_adapter,
    merged_logits,
    peft_logits,
    random_factors,
)
from safetensors.torch import load_file

from amoeba.lora.adapter_config import alpha_for
from amoeba.lora.factors import LoraFactors, from_peft, to_peft
from amoeba.lora.peft_files import Adapter, read_adapter, write_adapter
from selection import each_value_once, quick
from tiny_models import EXPERTS, HIDDEN, TOLERANCE, relative

pytestmark = pytest.mark.filterwarnings("ignore")


# What PEFT writes


@quick(lambda model_type, targets: model_type == MODELS[0] or targets == "both")
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", MODELS)
def test_our_factors_are_the_update_that_peft_computes(tmp_path: Path, model_type: str, targets: str) -> None:
    expected = make_adapter(tmp_path, model_type, TARGETS[targets])
    adapter = read_adapter(tmp_path, layouts(model_type))
    assert relative(merged_logits(model_type, adapter), expected) < TOLERANCE
    assert sorted(adapter.experts) == [EXPERTS_OF_LAYER.format(layer) for layer in range(2)]
    assert len(adapter.others) == 2 * 2 * 2  # q and v, A and B, in two layers
    for factors in adapter.experts.values():
        assert factors.scaling == ALPHA / RANK
        assert factors.gate_lora_a is factors.up_lora_a


@quick(lambda model_type, targets: model_type == MODELS[0] or targets == "both")
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", MODELS)
def test_peft_loads_what_we_write_and_computes_the_same(tmp_path: Path, model_type: str, targets: str) -> None:
    expected = make_adapter(tmp_path / "theirs", model_type, TARGETS[targets])
    adapter = read_adapter(tmp_path / "theirs", layouts(model_type))
    write_adapter(tmp_path / "ours", adapter)
    assert torch.equal(peft_logits(tmp_path / "ours", model_type), expected)
    assert_same_factors(read_adapter(tmp_path / "ours", layouts(model_type)), adapter)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("targets", TARGETS)
def test_a_model_is_not_needed_where_gate_and_up_lie_one_after_the_other(tmp_path: Path, targets: str) -> None:
    make_adapter(tmp_path, "mixtral", TARGETS[targets])
    assert_same_factors(read_adapter(tmp_path), read_adapter(tmp_path, layouts("mixtral")))


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    patterns = {
        "rank_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 4, "layers.1.mlp.experts.down_proj": 1},
        "alpha_pattern": {"layers.1.*experts.down_proj": 7, "layers.0.mlp.experts.down_proj": 2},
    }
    expected = make_adapter(tmp_path / "theirs", "qwen3_moe", BOTH, **patterns)
    adapter = read_adapter(tmp_path / "theirs", layouts("qwen3_moe"))
    first, second = (adapter.experts[EXPERTS_OF_LAYER.format(layer)] for layer in range(2))
    assert first.gate_lora_a.shape[1] == 4 and first.scaling == ALPHA / 4
    assert second.down_lora_a.shape[1] == 1 and second.scaling == ALPHA / RANK
    assert relative(merged_logits("qwen3_moe", adapter), expected) < TOLERANCE
    write_adapter(tmp_path / "ours", adapter)
    assert relative(peft_logits(tmp_path / "ours", "qwen3_moe"), expected) < TOLERANCE
    assert_same_factors(read_adapter(tmp_path / "ours", layouts("qwen3_moe")), adapter)


@pytest.mark.parametrize("ranks", [{"gate": 3, "up": 3, "down": 3}, {"gate": 2, "up": 5, "down": 1}])
def test_rank_stabilised_scaling(tmp_path: Path, ranks: dict[str, int]) -> None:
    expected = make_adapter(tmp_path / "theirs", "qwen3_moe", BOTH, use_rslora=True)
    adapter = read_adapter(tmp_path / "theirs", layouts("qwen3_moe"))
    assert adapter.experts[EXPERTS_OF_LAYER.format(0)].scaling == ALPHA / math.sqrt(RANK)
    assert relative(merged_logits("qwen3_moe", adapter), expected) < TOLERANCE
    write_adapter(tmp_path / "ours", adapter)
    assert torch.equal(peft_logits(tmp_path / "ours", "qwen3_moe"), expected)

    adapter.experts[EXPERTS_OF_LAYER.format(1)] = random_factors("qwen3_moe", ranks)
    write_adapter(tmp_path / "changed", adapter)
    expected = merged_logits("qwen3_moe", adapter)
    assert relative(peft_logits(tmp_path / "changed", "qwen3_moe"), expected) < TOLERANCE


def test_experts_without_a_gate(tmp_path: Path) -> None:
    parameters = ["experts.up_proj", "experts.down_proj"]
    expected = make_adapter(tmp_path / "theirs", "nemotron_h", parameters)
    adapter = read_adapter(tmp_path / "theirs", layouts("nemotron_h"))
    assert not adapter.gated
    assert all("gate_lora_a" not in factors.tensors() for factors in adapter.experts.values())
    assert relative(merged_logits("nemotron_h", adapter), expected) < TOLERANCE
    write_adapter(tmp_path / "ours", adapter)
    assert torch.equal(peft_logits(tmp_path / "ours", "nemotron_h"), expected)
    assert_same_factors(read_adapter(tmp_path / "theirs"), adapter)


def test_a_router_adapted_as_a_parameter_stays_one(tmp_path: Path) -> None:
    expected = make_adapter(
        tmp_path / "theirs", "qwen3_moe", [*BOTH, "mlp.gate.weight"], rank_pattern={"gate.weight": 2}
    )
    adapter = read_adapter(tmp_path / "theirs", layouts("qwen3_moe"))
    for config in (adapter.config, adapter.config | {"target_parameters": ["experts.gate_up_proj", "gate.weight"]}):
        write_adapter(tmp_path / "ours", Adapter(adapter.experts, adapter.others, config))
        assert torch.equal(peft_logits(tmp_path / "ours", "qwen3_moe"), expected)


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    make_adapter(tmp_path / "theirs", "qwen3_moe", BOTH)
    change_tensors(tmp_path / "theirs", lambda tensors: {key: value.bfloat16() for key, value in tensors.items()})
    adapter = read_adapter(tmp_path / "theirs")
    assert {tensor.dtype for tensor in adapter.experts[EXPERTS_OF_LAYER.format(0)].tensors().values()} == {
        torch.bfloat16
    }
    write_adapter(tmp_path / "ours", adapter)
    assert_same_factors(read_adapter(tmp_path / "ours"), adapter)


# Factors of ours that PEFT has no form for


@each_value_once()
@quick(lambda model_type, ranks: model_type == "gpt_oss" or ranks in ({"gate": 2}, {"gate": 1, "up": 4, "down": 2}))
@pytest.mark.parametrize(
    "ranks",
    [
        {"gate": 3, "up": 3, "down": 3},
        {"gate": 1, "up": 4, "down": 2},
        {"gate": 2},
        {"up": 2},
        {"up": 1, "down": 1},
        {"gate": 3, "down": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", MODELS)
def test_gate_and_up_with_factors_of_their_own(tmp_path: Path, model_type: str, ranks: dict[str, int]) -> None:
    experts = {EXPERTS_OF_LAYER.format(layer): random_factors(model_type, ranks, layer) for layer in range(2)}
    adapter = Adapter(experts, interleaved=model_type == "gpt_oss")
    write_adapter(tmp_path, adapter)
    assert relative(peft_logits(tmp_path, model_type), merged_logits(model_type, adapter)) < TOLERANCE
    assert_same_factors(read_adapter(tmp_path, layouts(model_type)), adapter)


def test_untrained_factors_come_back_as_they_were(tmp_path: Path) -> None:
    """With B all zero, the tensors alone do not say that gate and up have an A each."""
    factors = random_factors("qwen3_moe", {"gate": 2, "up": 2, "down": 2})
    for name in ("gate", "up", "down"):
        getattr(factors, f"{name}_lora_b").zero_()
    adapter = Adapter({EXPERTS_OF_LAYER.format(0): factors})
    write_adapter(tmp_path, adapter)
    assert_same_factors(read_adapter(tmp_path), adapter)


def test_layers_that_differ(tmp_path: Path) -> None:
    first = random_factors("mixtral", {"gate": 2, "up": 2, "down": 3}, 0, scaling=1 / 3)
    second = random_factors("mixtral", {"down": 4}, 1, scaling=0.1)
    adapter = Adapter({EXPERTS_OF_LAYER.format(0): first, EXPERTS_OF_LAYER.format(1): second})
    write_adapter(tmp_path, adapter)
    assert relative(peft_logits(tmp_path, "mixtral"), merged_logits("mixtral", adapter)) < TOLERANCE
    assert_same_factors(read_adapter(tmp_path, layouts("mixtral")), adapter)


def test_equal_values_of_a_are_written_once(tmp_path: Path) -> None:
    factors = random_factors("qwen3_moe", {"gate": 2, "up": 2})
    tied = LoraFactors(**factors.tensors() | {"up_lora_a": factors.gate_lora_a.clone()}, scaling=2.0)
    stacked = to_peft(tied)
    assert stacked.gate_rank is None
    assert stacked.gate_up.lora_A.shape == (EXPERTS * 2, HIDDEN)
    assert to_peft(factors).gate_up.lora_A.shape == (EXPERTS * 4, HIDDEN)


@pytest.mark.parametrize("scaling", [1.0, 0.1, 1 / 3, 2 / 7, 16.0, 1e-3])
@pytest.mark.parametrize("rank", [1, 3, 7, 64])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_alpha_gives_the_scaling_back(scaling: float, rank: int, use_rslora: bool) -> None:
    alpha = alpha_for(scaling, rank, use_rslora)
    assert alpha / (math.sqrt(rank) if use_rslora else rank) == pytest.approx(scaling, rel=3e-16)
    assert isinstance(alpha_for(16 / rank, rank, False), int)


@pytest.mark.parametrize("gate_rank", [None, 1])
@pytest.mark.parametrize("interleaved", [False, True])
def test_conversion_goes_there_and_back(interleaved: bool, gate_rank: int | None) -> None:
    ranks = {"gate": 2, "up": 2, "down": 1} if gate_rank is None else {"gate": 1, "up": 3, "down": 1}
    factors = random_factors("mixtral", ranks)
    if gate_rank is None:
        factors = LoraFactors(**factors.tensors() | {"up_lora_a": factors.gate_lora_a}, scaling=factors.scaling)
    there = to_peft(factors, interleaved=interleaved)
    assert there.gate_rank == gate_rank
    back = from_peft(there.gate_up, there.down, EXPERTS, interleaved=interleaved, gate_rank=there.gate_rank)
    assert_same_factors(Adapter({"m.experts": back}), Adapter({"m.experts": factors}))
