"""Adapter folders of PEFT: read as PEFT means them, written as PEFT reads them. The truth is the peft package."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import (
    ALPHA,
    BOTH,
    EXPERTS_OF_LAYER,
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
    random_factors,
)
from safetensors.torch import load_file
from torch import Tensor

import amoeba.lora.peft_files as peft_files
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.lora.adapter_config import alpha_for
from amoeba.lora.factors import LoraFactors, from_peft, to_peft
from amoeba.lora.peft_files import Adapter, read_adapter, write_adapter
from selection import each_value_once, quick
from tiny_models import EXPERTS, HIDDEN, TOLERANCE, relative

pytestmark = pytest.mark.filterwarnings("ignore")


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


@each_value_once()
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


# ---- Adapter folders that cannot be read or written are refused in words, and a failed write leaves the old one


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


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, "qwen3_moe", BOTH)
    return folder


@pytest.mark.parametrize("case", CONFIG_ERRORS)
def test_configs_that_are_refused(adapter_folder: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(adapter_folder, tmp_path, dirs_exist_ok=True)
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
    with pytest.raises(ValueError, match="a complete safetensors file"):
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


def test_new_tensors_never_stand_next_to_an_old_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, "qwen3_moe", BOTH)
    adapter = read_adapter(tmp_path)

    def fail(path: Path, text: str) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(peft_files, "write_whole", fail)
    with pytest.raises(OSError, match="power cut"):
        write_adapter(tmp_path, adapter)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)


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
