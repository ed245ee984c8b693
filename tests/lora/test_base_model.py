"""An adapter goes onto the model that it was trained on, whoever wrote it, and onto no other; routers have theirs."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from amoeba import lora
from amoeba.jobs.convert.merge import merge
from hostile_folders import change_json, save_adapter
from tiny_models import TOLERANCE, build, logits_of, relative, save_byte_tokenizer

peft = pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")

pytestmark = pytest.mark.filterwarnings("ignore")

SAME_SIZED = {"qwen3_moe": {"moe_intermediate_size": 24}, "mixtral": {"intermediate_size": 24}}


def by_peft(folder: Path, model: Any, embeddings: bool | str = False, **config: Any) -> Any:
    """The model with an adapter of PEFT's own, which is saved in the folder. embeddings: "auto" is PEFT's default."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, **{"task_type": "CAUSAL_LM"} | config))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        elif parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    adapted.save_pretrained(folder, save_embedding_layers=embeddings)
    return adapted


def test_our_adapter_of_qwen3_is_refused_by_a_mixtral_of_the_same_sizes(tmp_path):
    save_adapter(tmp_path, build("qwen3_moe", **SAME_SIZED["qwen3_moe"]))
    with pytest.raises(ValueError, match="model_type of the base model: expected 'mixtral'; got 'qwen3_moe'"):
        lora.load(build("mixtral", **SAME_SIZED["mixtral"]), tmp_path)
    lora.load(build("qwen3_moe", **SAME_SIZED["qwen3_moe"]), tmp_path)


@pytest.mark.parametrize("told_by", ["base_model_name_or_path", "auto_mapping"])
def test_pefts_adapter_of_qwen3_is_refused_by_a_mixtral_of_the_same_sizes(told_by, tmp_path):
    base = build("qwen3_moe", **SAME_SIZED["qwen3_moe"])
    if told_by == "base_model_name_or_path":
        base.save_pretrained(tmp_path / "base")
        by_peft(tmp_path, base, target_modules=["q_proj"])
        change_json(tmp_path / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    else:
        by_peft(tmp_path, base, target_modules=["q_proj"], task_type=None)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    with pytest.raises(ValueError, match="The adapter is for another model"):
        lora.load(build("mixtral", **SAME_SIZED["mixtral"]), tmp_path)
    lora.load(build("qwen3_moe", **SAME_SIZED["qwen3_moe"]), tmp_path)


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "model.layers.2.self_attn.q_proj, model.layers.2.self_attn.v_proj"),
        ({"target_modules": r".*\.q_proj"}, "model.layers.2.self_attn.q_proj"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "model.layers.2.mlp.experts"),
    ],
    ids=str,
)
def test_pefts_adapter_of_2_layers_names_what_is_missing_on_a_base_of_3(targets, missing, tmp_path):
    by_peft(tmp_path, build("qwen3_moe"), **{"target_modules": []} | targets)
    with pytest.raises(ValueError, match=f"expected factors for all that its targets name.*; got none for {missing}"):
        lora.load(build("qwen3_moe", num_hidden_layers=3), tmp_path)
    lora.load(build("qwen3_moe"), tmp_path)


def test_our_adapter_of_2_layers_is_refused_by_a_base_of_3(tmp_path):
    save_adapter(tmp_path, build("qwen3_moe"))
    with pytest.raises(ValueError, match="layers of the base model: expected 3; got 2"):
        lora.load(build("qwen3_moe", num_hidden_layers=3), tmp_path)


def test_layers_that_are_left_out_on_purpose_are_no_fault(tmp_path, our_log):
    model = build("qwen3_moe")
    want = logits_of(by_peft(tmp_path, copy.deepcopy(model), target_modules=["q_proj"], layers_to_transform=[0]))
    lora.load(model, tmp_path)
    assert relative(logits_of(model), want) < TOLERANCE
    one = build("qwen3_moe")
    save_adapter(tmp_path / "ours", one, targets=("layers.1.mlp.experts",))
    lora.load(build("qwen3_moe"), tmp_path / "ours")
    assert "the adapter changes the experts of 1 of 2 layers" in our_log.text


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_pefts_all_linear_adapter_with_the_router_is_served_merged_and_saved(model_type, tmp_path):
    model = build(model_type)
    theirs = by_peft(tmp_path / "theirs", copy.deepcopy(model), target_modules="all-linear")
    try:
        want = logits_of(theirs)
    except AttributeError as error:
        pytest.skip(f"PEFT {peft.__version__} cannot run it with transformers {transformers.__version__}: {error}")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = lora.load(model, tmp_path / "theirs")
    assert any(name.endswith(".gate") for name in state.linears)
    assert relative(logits_of(model), want) < TOLERANCE
    lora.save(model, tmp_path / "ours")
    lora.merge(model)
    assert relative(logits_of(model), want) < TOLERANCE
    lora.unmerge(model)
    lora.detach(model)
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.state_dict().items())
    lora.load(model, tmp_path / "ours")
    assert relative(logits_of(model), want) < TOLERANCE
    read_by_peft = peft.PeftModel.from_pretrained(build(model_type), tmp_path / "ours")
    assert relative(logits_of(read_by_peft), want) < TOLERANCE


def test_factors_on_what_is_neither_linear_nor_a_router_say_what_to_do(tmp_path):
    by_peft(tmp_path, build("qwen3_moe"), target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="factors of a linear layer, of experts or of a router; got Embedding"):
        lora.load(build("qwen3_moe"), tmp_path)


def test_the_frozen_weight_that_peft_saves_with_an_output_head_is_no_fault(tmp_path):
    want = logits_of(by_peft(tmp_path, build("qwen3_moe"), embeddings="auto", target_modules=["lm_head"]))
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "adapter_model.safetensors")
    model = build("qwen3_moe")
    lora.load(model, tmp_path)
    assert relative(logits_of(model), want) < TOLERANCE
    lora.load(model, tmp_path)
    assert relative(logits_of(model), want) < TOLERANCE


def tied() -> Any:
    model = build("qwen3_moe", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_a_tied_layer_that_peft_trained_apart_is_refused(whole, tmp_path):
    by_peft(tmp_path, tied(), target_modules=["q_proj"], modules_to_save=whole)
    with pytest.raises(ValueError, match=r"with which it shares its weight in this model\. Train it again with ensure"):
        lora.load(tied(), tmp_path)


def test_tied_layers_that_peft_trained_as_one_are_loaded_and_merged(tmp_path):
    base = tied()
    base.save_pretrained(tmp_path / "base")
    together = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    if "ensure_weight_tying" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"PEFT {peft.__version__} always trains a copy")
    want = logits_of(by_peft(tmp_path / "adapter", base, target_modules=["q_proj"], **together))
    model = tied()
    lora.load(model, tmp_path / "adapter")
    assert relative(logits_of(model), want) < TOLERANCE
    save_byte_tokenizer(tmp_path / "base")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative(logits_of(merged), want) < TOLERANCE


def test_factors_on_a_tied_layer_are_served_and_not_merged(tmp_path):
    model = tied()
    want = logits_of(by_peft(tmp_path, copy.deepcopy(model), target_modules=["lm_head"]))
    base = model.model.embed_tokens.weight.clone()
    lora.load(model, tmp_path)
    with pytest.raises(ValueError, match=r"got lm_head, which has the weight of model.embed_tokens.weight, too"):
        lora.merge(model)
    assert torch.equal(model.model.embed_tokens.weight, base) and relative(logits_of(model), want) < TOLERANCE


def test_rows_of_an_embedding_that_peft_trained_say_what_to_do(tmp_path):
    by_peft(tmp_path, build("qwen3_moe"), target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ValueError, match=r"token_adapter.*: expected a tensor of this model; got .* Merge the adapter"):
        lora.load(build("qwen3_moe"), tmp_path)
