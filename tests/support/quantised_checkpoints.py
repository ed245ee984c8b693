"""Small quantised checkpoints as the hub has them, written without amoeba's own writer, and their dequantised twins.

    twin = write_fp8(folder)         # Qwen3-MoE in DeepSeek-V3's layout: e4m3 and weight_scale_inv, 128 x 128
    twin = write_mxfp4(folder)       # gpt-oss: blocks and scales
    twin = quantise_saved(model, folder, block=16)     # what save_pretrained wrote of any model, in FP8

A twin is the same model with every number dequantised, in fp32: the truth about the checkpoint.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GptOssConfig, Qwen3MoeConfig

from tiny_models import randomise, save_byte_tokenizer, tiny_config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ONE_FILE = "model.safetensors"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_fp8(folder: Path, scale_dtype: str = "float32", **sizes: int):
    sizes = {"hidden_size": 136, "moe_intermediate_size": 136, **sizes}
    config = tiny_config(Qwen3MoeConfig, "qwen3_moe", vocab_size=257, eos_token_id=256, pad_token_id=256, **sizes)
    twin = quantise_saved(_saved(config, folder), folder, scale_dtype=scale_dtype)
    assert sum("experts.0.gate_proj.weight_scale_inv" in name for name in load_file(folder / ONE_FILE)) == 2
    return twin


def quantise_saved(model, folder: Path, *, block: int = 128, scale_dtype: str = "float32"):
    """The linears and the experts, one by one or in stacks, of a checkpoint in one file."""
    tensors = load_file(folder / ONE_FILE)
    numbers = dict(tensors)
    for name in [name for name, tensor in tensors.items() if _is_quantised(name, tensor)]:
        quantised, scales = _fp8(tensors[name], block, power_of_two=scale_dtype != "float32")
        tensors[name], tensors[f"{name}_scale_inv"] = quantised, scales.to(getattr(torch, scale_dtype))
        numbers[name] = _plain(quantised, scales, block)
    save_file(tensors, folder / ONE_FILE, {"format": "pt"})
    scale_fmt = {} if scale_dtype == "float32" else {"scale_fmt": "ue8m0"}
    _tell(folder, FP8 | scale_fmt | {"weight_block_size": [block, block]})
    return _with_numbers(model, numbers)


def write_mxfp4(folder: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256}
    twin = _saved(tiny_config(GptOssConfig, "gpt_oss", **sizes), folder)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes, scales, values = _mxfp4(tensors.pop(name).transpose(1, 2))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes, scales
        numbers[name] = values.transpose(1, 2)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    _tell(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    return _with_numbers(twin, rest | numbers)


def _saved(config, folder: Path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = randomise(AutoModelForCausalLM.from_config(config)).eval()
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return model


def _tell(folder: Path, facts: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": facts}))
    assert AutoConfig.from_pretrained(folder).quantization_config


def _with_numbers(twin, numbers: dict[str, Tensor]):
    """Loaded as any checkpoint is."""
    model = type(twin).from_pretrained(
        None, config=twin.config, state_dict={name: tensor.float() for name, tensor in numbers.items()}
    )
    return model.float().eval()


def _is_quantised(name: str, tensor: Tensor) -> bool:
    of_experts = re.search(r"(?<!shared_)experts\.|block_sparse_moe\.(in|out)put_linear", name)
    is_matrix = tensor.dim() == 3 if of_experts and not name.endswith("weight") else tensor.dim() >= 2
    return is_matrix and (bool(of_experts) or name.endswith("proj.weight"))


def _plain(quantised: Tensor, scales: Tensor, block: int) -> Tensor:
    rows, columns = quantised.shape[-2:]
    spread = scales.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return quantised.float() * spread


def _fp8(weight: Tensor, block: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    *leading, rows, columns = weight.shape
    scales = torch.ones(*leading, -(-rows // block), -(-columns // block))
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(0, rows, block):
        for j in range(0, columns, block):
            here = (..., slice(i, i + block), slice(j, j + block))
            numbers = weight[here].float()
            scale = numbers.abs().amax((-2, -1)) / 448
            scale = torch.exp2(scale.log2().ceil()) if power_of_two else scale
            scales[..., i // block, j // block] = scale
            quantised[here] = (numbers / scale[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantised, scales


def _mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E, out, in) -> blocks (E, out, in/32, 16), scales (E, out, in/32), and the numbers."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * scaled.sign() * torch.exp2(exponent)[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8), values.flatten(-2)
