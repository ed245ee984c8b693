"""Quantised checkpoints and stores as the base of `merge`, `quantise` and experts packed for the CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amoeba import lora
from amoeba.cpu import placements as cpu_placements
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.model_folder import load_model
from amoeba.jobs.convert.merge import merge
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.jobs.cpu_dtype import DtypeChoice
from amoeba.jobs.placed_model import load_placed
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.store.packing import pack
from quantised_checkpoints import write_fp8, write_mxfp4
from selection import each_value_once, quick
from tiny_models import build, relative, save_byte_tokenizer, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")
needs_engine = pytest.mark.skipif(cpu_placements._why_not() is not None, reason=str(cpu_placements._why_not()))
# Relative L2 of normal numbers: fp8 has 3 bits of mantissa, e2m1 one. (docs/precision.md)
ERRORS = {"fp8": 0.04, "mxfp8": 0.04, "mxfp4": 0.15, "nvfp4": 0.13}


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def base(request, tmp_path_factory) -> tuple[Path, str, Any]:
    """A checkpoint as the hub has it, its format, and its dequantised twin; an adapter beside it."""
    pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    root = tmp_path_factory.mktemp(request.param)
    twin = (write_fp8 if request.param == "fp8" else write_mxfp4)(root / "base").eval()
    save_adapter(load_model(str(root / "base"), torch.float32), root / "adapter")
    return root, request.param, twin


def save_adapter(model: Any, folder: Path) -> None:
    lora.attach(model, 2, 4, ["experts", "q_proj"])
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    lora.save(model, folder)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits.float()


def adapted(twin: Any, adapter: Path) -> Tensor:
    lora.load(twin, adapter)
    found = logits(twin)
    lora.detach(twin)
    return found


def formats_in(folder: Path) -> set[str]:
    placed = [placed_in(module) for module in experts_modules(load_model(str(folder), None)).values()]
    return {each.format.name if isinstance(each, QuantisedExperts) else "numbers" for each in placed}


@quick(lambda base: base == "mxfp4")
def test_merge_into_a_quantised_base_quantises_again_and_tells_the_error(base, tmp_path: Path) -> None:
    root, format, twin = base
    expected = adapted(twin, root / "adapter")
    report = merge(root / "base", root / "adapter", tmp_path / "merged")
    assert report.format == format and report.quantisation_error is not None
    assert 0 < report.quantisation_error < ERRORS[format]
    found = logits(load_model(str(tmp_path / "merged"), torch.float32))
    before = logits(twin)
    assert relative(found, expected) < 4 * report.quantisation_error < relative(before, expected)
    assert formats_in(tmp_path / "merged") == formats_in(root / "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_merge_into_what_quantise_wrote_in_nvfp4(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    build("qwen3_moe").save_pretrained(tmp_path / "plain")
    save_byte_tokenizer(tmp_path / "plain")
    quantise_folder(tmp_path / "plain", tmp_path / "base", "nvfp4")
    save_adapter(load_model(str(tmp_path / "base"), None), tmp_path / "adapter")
    report = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert report.format == "nvfp4" and 0.05 < (report.quantisation_error or 0) < ERRORS["nvfp4"]
    assert formats_in(tmp_path / "merged") == {"nvfp4"}
    model = load_model(str(tmp_path / "base"), None)
    lora.load(model, tmp_path / "adapter")
    assert relative(logits(load_model(str(tmp_path / "merged"), None)), logits(model)) < 4 * ERRORS["nvfp4"]


def test_merge_with_a_dtype_writes_plain_numbers(base, tmp_path: Path) -> None:
    root, _, twin = base
    report = merge(root / "base", root / "adapter", tmp_path / "merged", torch.float32)
    assert report.format is None and report.dtype == "float32"
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_bytes())
    found = logits(type(twin).from_pretrained(tmp_path / "merged", dtype=torch.float32))  # plain transformers
    assert relative(found, adapted(twin, root / "adapter")) < 1e-5


def test_a_store_is_merged_after_its_folder_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "base")
    save_byte_tokenizer(tmp_path / "base")
    save_adapter(load_model(str(tmp_path / "base"), None), tmp_path / "adapter")
    pack(tmp_path / "base", tmp_path / "store")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "expected")
    shutil.rmtree(tmp_path / "base")
    merge(tmp_path / "store", tmp_path / "adapter", tmp_path / "merged")
    found, expected = (load_model(str(tmp_path / name), None).state_dict() for name in ("merged", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@each_value_once()
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_experts_are_quantised_from_another_format_and_from_a_store(base, format: str, tmp_path: Path) -> None:
    root, _, twin = base
    quantise_folder(root / "base", tmp_path / "again", format)
    assert formats_in(tmp_path / "again") == {format}
    found = logits(load_model(str(tmp_path / "again"), torch.float32))
    assert relative(found, logits(twin)) < 4 * ERRORS[format]
    pack(root / "base", tmp_path / "store")
    quantise_folder(tmp_path / "store", tmp_path / "from_store", format)
    assert torch.equal(logits(load_model(str(tmp_path / "from_store"), torch.float32)), found)
    with pytest.raises(ValueError, match=r"--out: expected a folder that does not exist yet"):
        quantise_folder(root / "base", tmp_path / "again", format)


@quick(lambda base: base == "fp8")
def test_quantising_again_in_the_same_format_changes_no_number(base, tmp_path: Path) -> None:
    root, format, _ = base
    quantise_folder(root / "base", tmp_path / "again", format)
    found, expected = (load_model(str(folder), torch.float32) for folder in (tmp_path / "again", root / "base"))
    assert relative(logits(found), logits(expected)) < 1e-6


@needs_engine
@each_value_once()
@pytest.mark.parametrize("placement", ["cpu-int8", "cpu-bf16"])
def test_experts_are_packed_for_the_cpu_out_of_codes(base, placement: str, tmp_path: Path) -> None:
    root, _, twin = base
    pack(root / "base", tmp_path / "store")
    choice = DtypeChoice(torch.float32, None, "as asked")
    for source in (root / "base", tmp_path / "store"):
        model, placed = load_placed(str(source), choice, placement, trains=False, device=torch.device("cpu"))
        assert placed.placement == placement
        assert relative(logits(model), logits(twin)) < (0.03 if placement == "cpu-int8" else 0.01)
