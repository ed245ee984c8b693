"""Checkpoints of compressed-tensors and ModelOpt: their codes are read, resident, streamed and packed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from amoeba import stream
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.model_folder import load_model
from amoeba.jobs.convert.merge import write_plain
from amoeba.precision.formats import MXFP4, MXFP8, NVFP4, Format, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.stream.store import open_store
from amoeba.stream.store.packing import pack
from tiny_models import randomise, save_byte_tokenizer, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN, INTERMEDIATE = 64, 32


class Layout(NamedTuple):
    """store: what a linear's name and matrix become."""

    facts: dict[str, Any]
    format: Format
    store: Callable[[str, QuantisedMatrix], dict[str, Tensor]]


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"symmetric": True}}}
    return {"quant_method": "compressed-tensors", "quant_status": "compressed", "config_groups": groups}


def e4m3(name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
    scales = matrix.scales.bfloat16() if matrix.scales.is_floating_point() else matrix.scales
    return {f"{name}.weight": matrix.data.view(torch.float8_e4m3fn), f"{name}.weight_scale": scales}


def one_scale(name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
    return e4m3(name, matrix) | {f"{name}.weight_scale": matrix.scales.reshape(1), f"{name}.input_scale": torch.ones(1)}


def packed(name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
    return {f"{name}.weight_packed": matrix.data, f"{name}.weight_scale": matrix.scales}


def packed_nvfp4(name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
    found = packed(name, matrix) | {f"{name}.weight_scale": matrix.scales.view(torch.float8_e4m3fn)}
    return found | {f"{name}.weight_global_scale": 1 / matrix.matrix_scale.reshape(1)}


def of_modelopt(name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
    scales = matrix.scales.view(torch.float8_e4m3fn)
    return {
        f"{name}.weight": matrix.data,
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": matrix.matrix_scale,
        f"{name}.input_scale": torch.ones(()),
    }


WHOLE = 2**16
LAYOUTS = {
    "fp8 tensor": Layout(compressed(type="float", num_bits=8, strategy="tensor"), fp8_blocks(WHOLE, WHOLE), one_scale),
    "fp8 channel": Layout(compressed(type="float", num_bits=8, strategy="channel"), fp8_blocks(1, WHOLE), e4m3),
    "fp8 block": Layout(
        compressed(type="float", num_bits=8, strategy="block", block_structure=[32, 32]), fp8_blocks(32, 32), e4m3
    ),
    "mxfp8": Layout(compressed(type="float", num_bits=8, strategy="group", group_size=32), MXFP8, e4m3),
    "mxfp4": Layout(compressed(type="float", num_bits=4, strategy="group", group_size=32), MXFP4, packed),
    "nvfp4": Layout(
        compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16), NVFP4, packed_nvfp4
    ),
    "modelopt nvfp4": Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4, of_modelopt),
    "modelopt fp8": Layout({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_blocks(WHOLE, WHOLE), one_scale),
}  # fmt: skip

QUICK = ("fp8 channel", "nvfp4")


def write(folder: Path, layout: Layout) -> Any:
    """The model with its codes as numbers, in fp32."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "vocab_size": 257, "head_dim": 16}
    config = tiny_config(Qwen3MoeConfig, "qwen3_moe", eos_token_id=256, pad_token_id=256, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(AutoModelForCausalLM.from_config(config)).eval()
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    numbers, found = dict(tensors), {}
    largest: dict[str, Tensor] = {}  # gate and up of an expert have one matrix scale
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            stem = name.rpartition(".")[0].rpartition(".")[0]
            largest[stem] = torch.maximum(largest.get(stem, tensor.new_zeros(())), tensor.abs().amax())
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            found[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        matrix = quantise(tensor, layout.format)
        pair = name.endswith(("gate_proj.weight", "up_proj.weight"))
        if layout.format is NVFP4 and pair:
            most = largest[stem.rpartition(".")[0]].expand(1, tensor.shape[1])
            whole = quantise(torch.cat((tensor, most)), NVFP4)
            matrix = replace(whole, data=whole.data[:-1], scales=whole.scales[:-1])
        elif layout.store is e4m3 and matrix.scales.is_floating_point():
            matrix = replace(matrix, scales=matrix.scales.bfloat16().float())  # as the file has them
        found |= layout.store(stem, matrix)
        numbers[name] = matrix.dequantise()
    save_file({name: each.contiguous() for name, each in found.items()}, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"quantization_config": layout.facts}))
    twin = type(model).from_pretrained(None, config=config, state_dict=numbers)
    return twin.float().eval()


def logits(model: Any) -> Tensor:
    ids = torch.tensor([[3, 9, 27, 80, 4, 9]])
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in LAYOUTS]
)
def test_codes_are_the_numbers_that_they_stand_for(name: str, tmp_path: Path) -> None:
    expected = logits(write(tmp_path / "model", LAYOUTS[name]))
    model = load_model(str(tmp_path / "model"), torch.float32)
    placed = [placed_in(module) for module in experts_modules(model).values()]
    assert all(each.format == LAYOUTS[name].format for each in placed)
    assert torch.allclose(logits(model), expected, atol=1e-4, rtol=1e-4)
    pack(tmp_path / "model", tmp_path / "store")
    for source in ("model", "store"):
        with stream.attach(tmp_path / source, ram="1GiB", dtype=torch.float32) as streamed:
            assert torch.allclose(logits(streamed.model), expected, atol=1e-4, rtol=1e-4), source
    with open_store(tmp_path / "store") as store:
        write_plain(store, tmp_path / "numbers", torch.float32)
    assert torch.allclose(logits(load_model(str(tmp_path / "numbers"), None)), expected, atol=1e-4, rtol=1e-4)
