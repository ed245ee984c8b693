"""`amoeba merge` writes the base model's folder with other numbers in the weights that the adapter changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from amoeba import lora
from amoeba.integrations.model_folder import load_model
from amoeba.jobs.convert.merge import merge
from amoeba.stream.store.tensor_files import SHARDS
from tiny_composites import build_composite
from tiny_models import build, experts_classes, relative, save_byte_tokenizer, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vision part in several files, and an adapter for its experts and routers."""
    pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    root = tmp_path_factory.mktemp("merge")
    build_composite("qwen3_5_moe").save_pretrained(root / "base", max_shard_size="150KB")
    save_byte_tokenizer(root / "base")
    (root / "base" / "preprocessor_config.json").write_text("{}")
    config = json.loads((root / "base" / "config.json").read_bytes())
    config["text_config"]["dtype"] = "float32"  # as on the hub
    (root / "base" / "config.json").write_text(json.dumps(config))
    model = load_model(str(root / "base"), None)
    lora.attach(model, 2, 4, ["experts", "q_proj"], train_router=True)
    _shake(model)
    lora.save(model, root / "adapter")
    return root


def test_merge_changes_the_adapted_weights_alone(inputs: Path, tmp_path: Path) -> None:
    merge(inputs / "base", inputs / "adapter", tmp_path / "merged")
    before, after = _tensors(inputs / "base"), _tensors(tmp_path / "merged")
    assert len(before) > 1
    assert {file: list(tensors) for file, tensors in after.items()} == {
        f: list(tensors) for f, tensors in before.items()
    }
    changed = [
        name for file in before for name in before[file] if not torch.equal(before[file][name], after[file][name])
    ]
    assert changed
    assert all(".experts." in name or ".q_proj." in name or ".mlp.gate." in name for name in changed)
    for file in ("config.json", "generation_config.json", "preprocessor_config.json", SHARDS):
        assert json.loads((tmp_path / "merged" / file).read_bytes()) == json.loads(
            (inputs / "base" / file).read_bytes()
        )


def test_merge_into_another_dtype_converts_every_part(inputs: Path, tmp_path: Path) -> None:
    merge(inputs / "base", inputs / "adapter", tmp_path / "merged", torch.bfloat16)
    tensors = {name: tensor for file in _tensors(tmp_path / "merged").values() for name, tensor in file.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    index = json.loads((tmp_path / "merged" / SHARDS).read_bytes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    config = json.loads((tmp_path / "merged" / "config.json").read_bytes())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def _tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path.name] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", experts_classes())
def test_a_merged_model_of_every_family_computes_what_the_adapter_does(model_type: str, tmp_path: Path) -> None:
    """Read back in its own class, from tensors that have the names and shapes of the base model's."""
    pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    model = build(model_type)
    if type(model.config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip(f"{type(model).__name__} is a part of another model: tests/integrations/test_composite_models.py")
    model.save_pretrained(tmp_path / "base")
    save_byte_tokenizer(tmp_path / "base")
    model = load_model(str(tmp_path / "base"), None)
    lora.attach(model, 2, 4, "all-linear")
    _shake(model)
    lora.save(model, tmp_path / "adapter")
    ids = token_ids()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
        found = load_model(str(tmp_path / "merged"), None)(input_ids=ids, use_cache=False).logits
    assert relative(found, expected) < 1e-4
    assert {file: list(tensors) for file, tensors in _tensors(tmp_path / "merged").items()} == {
        file: list(tensors) for file, tensors in _tensors(tmp_path / "base").items()
    }


def _shake(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
