"""Every model type that takes an experts implementation, as an FP8 checkpoint: its numbers are the dequantised ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import amoeba
from amoeba import lora
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts
from amoeba.stream.store.mapping import CodedCheckpoint
from amoeba.stream.store.tensor_files import checkpoint_tensors
from quantised_checkpoints import FP8, quantise_saved
from selection import quick
from tiny_models import build, experts_classes, needs, randomise, relative, tiny_config, token_ids

amoeba.register()
BLOCK = 16  # of 32, 48 and 24 rows and columns: some blocks are cut
OWN_ACTIVATION = ("inkling2", "muse_spark")
NOT_A_TEXT_MODEL = "Qwen3OmniMoeTalkerTextExperts"
FAMILIES = [(model_type, name) for model_type, names in experts_classes().items() for name in names]
# Shared experts, other names, no gate, stacks, stacks with gate and up in turns, stacks of (E, in, out).
KINDS = ("deepseek_v3", "minimax_m2", "nemotron_h", "granitemoe", "gpt_oss", "aria", "muse_spark")


def output(model: Any) -> Tensor:
    answer = model(input_ids=token_ids(), use_cache=False)
    return answer.logits if "logits" in answer else answer.last_hidden_state


def gradients(model: Any) -> dict[str, Tensor | None]:
    model.set_experts_implementation("amoeba")
    lora.attach(model, r=2, alpha=4)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    output(model).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@quick(lambda family: family[0] in KINDS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[1])
def test_a_family_in_fp8_has_the_numbers_of_its_dequantised_model(family: tuple[str, str], tmp_path: Path) -> None:
    if family[1] == NOT_A_TEXT_MODEL:
        pytest.skip("takes no token ids")
    model = build(*family)
    model.save_pretrained(tmp_path)
    twin = quantise_saved(model, tmp_path, block=BLOCK)
    options = {"experts_implementation": "amoeba", "dtype": torch.float32}
    if family[0] in OWN_ACTIVATION:
        with pytest.raises(ValueError, match="an activation that aMoEba computes itself"):
            type(model).from_pretrained(tmp_path, **options)
        return
    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True, **options)
    placed = [placed_in(module) for module in experts_modules(loaded.eval()).values()]
    assert placed and all(isinstance(experts, QuantisedExperts) for experts in placed)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with torch.no_grad():
        assert relative(output(loaded), output(twin)) <= 1e-5
    found, expected = gradients(loaded), gradients(copy.deepcopy(twin))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        theirs = found[name]
        assert (theirs is None) == (gradient is None)
        if theirs is not None and gradient is not None:
            assert relative(theirs, gradient) <= 1e-4, name


@pytest.mark.parametrize("transposed", [False, True])
def test_qwen3_vl_may_have_its_experts_as_in_and_out(transposed: bool, tmp_path: Path) -> None:
    """Its files on the hub are (E, in, out), what save_pretrained writes is (E, out, in)."""
    model = _qwen3_vl()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if transposed:
        turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
        save_file(turned, file, {"format": "pt"})
    twin = quantise_saved(model, tmp_path, block=BLOCK)
    options = {"experts_implementation": "amoeba", "dtype": torch.float32}
    loaded = type(model).from_pretrained(tmp_path, **options).eval()
    with torch.no_grad():
        assert relative(output(loaded), output(twin)) <= 1e-5
    assert _as_streamed(model, tmp_path)[0].equal(dequantise_experts(_first(loaded)).gate_up_EJH)
    assert _as_streamed(model, tmp_path)[1].equal(dequantise_experts(_first(loaded)).down_EHI)


def test_blocks_that_are_not_square_are_refused_in_a_transposed_stack(tmp_path: Path) -> None:
    model = build(needs("aria"))
    model.save_pretrained(tmp_path)
    quantise_saved(model, tmp_path, block=BLOCK)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {n: t.float() for n, t in tensors.items() if ".experts." not in n and not n.endswith("_scale_inv")}
    save_file(
        {n: t for n, t in tensors.items() if ".experts." in n} | rest, tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("[16, 16]", "[16, 32]"))
    with pytest.raises(ValueError, match=r"square blocks of scales in a transposed tensor; got 16 x 32 in .*fc1"):
        type(model).from_pretrained(tmp_path, experts_implementation="amoeba")


def _first(model: Any) -> QuantisedExperts:
    found = placed_in(next(iter(experts_modules(model).values())))
    assert isinstance(found, QuantisedExperts)
    return found


def _as_streamed(model: Any, folder: Path) -> tuple[Tensor, Tensor]:
    """The first layer's experts as a store reads them from the folder."""
    facts = FP8 | {"weight_block_size": [BLOCK, BLOCK]}
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    checkpoint = CodedCheckpoint(empty, checkpoint_tensors(folder), facts, torch.float32)
    name, module = next(iter(experts_modules(empty).items()))
    mapped = checkpoint.layer(name, module)
    entry = mapped.entry
    blobs = torch.zeros(entry.experts, entry.expert_bytes, dtype=torch.uint8)
    for expert, blob in enumerate(blobs):
        for piece in mapped.pieces:
            file, start = piece.range_of(expert)
            data = file.read_bytes()[start : start + piece.size]
            piece.put(expert, torch.frombuffer(bytearray(data), dtype=torch.uint8), blob)
    dense = dequantise_experts(entry.weights(blobs))
    return dense.gate_up_EJH, dense.down_EHI


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig

    text = tiny_config(Qwen3VLMoeTextConfig, "qwen3_vl_moe").to_dict()
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    return randomise(Qwen3VLMoeForConditionalGeneration(config)).eval()
