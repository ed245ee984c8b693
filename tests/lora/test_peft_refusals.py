"""Adapter folders that cannot be read or written are refused in words, and a failed write leaves the old one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import (
    BOTH,
    RANK,
    TARGETS,
    change_config,
    change_tensors,
    layouts,
    make_adapter,
    make_v4_adapter,
    random_factors,
)

import amoeba.lora.peft_files as peft_files
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.lora.factors import LoraFactors
from amoeba.lora.peft_files import Adapter, read_adapter, write_adapter
from selection import each_value_once
from tiny_models import HIDDEN

pytestmark = pytest.mark.filterwarnings("ignore")


# Errors


def drop(part: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


CONFIG_ERRORS = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type: expected LORA; got 'IA3'"),
    "dora": ({"use_dora": True}, "use_dora: expected False or None; got True"),
    "bias": ({"bias": "all"}, "bias: expected 'none' or None; got 'all'"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: .*got 'pissa_niter_4'"),
    "rank 0": ({"r": 0}, "r of .*: expected a whole number above 0; got 0"),
    "no rank": ({"r": None}, "r of .*expected a whole number above 0; got None"),
    "rank 0 by pattern": ({"rank_pattern": {"down_proj": 0}}, "r of .*experts.down_proj.*got 0"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha of .*expected a finite number, not 0; got nan"),
    "alpha infinite": ({"alpha_pattern": {"down_proj": math.inf}}, "lora_alpha of .*experts.down_proj.*got inf"),
    "alpha a word": ({"lora_alpha": "16"}, "lora_alpha of .*got 16"),
    "another rank": ({"rank_pattern": {"down_proj": 4}}, r"lora_A \(E·4, in\).*got \(18, 24\) and \(32, 18\)"),
    "ranks of different layers": (
        {"rank_pattern": {"down_proj": 9}},
        r"as many experts in both parameters; got \[2, 6\]",
    ),
    "rank of attention": ({"rank_pattern": {"q_proj": 2}}, r"q_proj.lora_A.weight: expected rank 2.*got \(3, 32\)"),
    "no such parameter": ({"target_parameters": ["experts.down_proj"]}, "lora_A and lora_B for each of .'down_proj'"),
}


@pytest.mark.parametrize("case", CONFIG_ERRORS)
def test_configs_that_are_refused(tmp_path: Path, case: str) -> None:
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    changes, message = CONFIG_ERRORS[case]
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, layouts("qwen3_moe"))


TENSOR_ERRORS = {
    "no B": (drop("experts.lora_B"), "lora_A and lora_B for each of"),
    "no inner": (drop("base_layer"), r"for each of \['gate_up_proj', 'down_proj'\]"),
    "unknown": (
        lambda tensors: tensors | {"m.experts.fc1.lora_A.weight": torch.ones(1, 1)},
        "m.experts.fc1.lora_A.weight: ",
    ),
    "half the rows": (
        lambda tensors: {key: value[:9] if "experts.lora_A" in key else value for key, value in tensors.items()},
        r"got \(9, 24\) and \(32, 18\)",
    ),
}


@each_value_once()
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("case", TENSOR_ERRORS)
def test_tensors_that_are_refused(tmp_path: Path, case: str, with_model: bool) -> None:
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    change, message = TENSOR_ERRORS[case]
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, layouts("qwen3_moe") if with_model else None)


@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, targets: str) -> None:
    make_adapter(tmp_path, "qwen3_moe", TARGETS[targets])
    change_config(tmp_path, base_model_name_or_path="their/model")
    message = "expected those for 6 experts of hidden 32 and intermediate 48; got .*18.*their/model"
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, layouts("mixtral"))
    with pytest.raises(ValueError, match="in one of none"):
        read_adapter(tmp_path, {})
    more = {name: ExpertsLayout(9, HIDDEN, 24) for name in layouts("qwen3_moe")}
    with pytest.raises(ValueError, match=r"lora_a: expected shape \(9, 3, \d+\) for 9 experts.*got \(6, 3, \d+\)"):
        read_adapter(tmp_path, more)


def test_per_expert_files_that_are_refused(tmp_path: Path) -> None:
    make_v4_adapter(tmp_path, "qwen3_moe", {"gate": RANK, "up": RANK})
    with pytest.raises(ValueError, match=r"expected shape \(6, 48, 3\)"):
        read_adapter(tmp_path, layouts("mixtral"))
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: expected one of m.experts; got no such experts"):
        read_adapter(tmp_path, {"m.experts": ExpertsLayout(6, 32, 24)})
    change_config(tmp_path, rank_pattern={"experts.3.up_proj": 2})
    with pytest.raises(ValueError, match=r"experts.3.up_proj: lora_A and lora_B: expected \(2, in\)"):
        read_adapter(tmp_path)
    change_config(tmp_path, rank_pattern={})
    change_tensors(tmp_path, drop("experts.4.up_proj.lora_A"))
    with pytest.raises(ValueError, match=r"none for 4.up_proj.lora_A"):
        read_adapter(tmp_path)


def test_folders_that_hold_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json: expected the config of a PEFT adapter"):
        read_adapter(tmp_path)
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    tensors = tmp_path / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a whole safetensors file"):
        read_adapter(tmp_path)
    tensors.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="is a pickle and not read"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        read_adapter(tmp_path)


def test_adapters_that_are_not_written(tmp_path: Path) -> None:
    factors = random_factors("qwen3_moe", {"gate": 2})
    bad = {
        "factors of at least one layer": Adapter({}),
        "a finite number, not 0; got nan": Adapter({"m.experts": LoraFactors(**factors.tensors(), scaling=math.nan)}),
        "both factors": Adapter({"m.experts": LoraFactors(gate_lora_a=factors.gate_lora_a)}),
        "none for experts without a gate": Adapter({"m.experts": factors}, gated=False),
    }
    for message, adapter in bad.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            write_adapter(tmp_path / "adapter", adapter)
    assert not (tmp_path / "adapter").exists()


# Files


def test_a_write_that_fails_leaves_the_old_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_adapter(tmp_path, read_adapter(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_new_tensors_never_stand_beside_an_old_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    adapter = read_adapter(tmp_path)

    def fail(path: Path, text: str) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(peft_files, "write_whole", fail)
    with pytest.raises(OSError, match="power cut"):
        write_adapter(tmp_path, adapter)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
