"""Adapters of tiny models as PEFT makes them, and the logits that they give."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amoeba.integrations.experts_module import ExpertsLayout, layouts_of
from amoeba.lora.factors import LoraFactors
from amoeba.lora.peft_files import Adapter
from tiny_models import EXPERTS, HIDDEN, build, logits_of

peft = pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'amoeba-moe[hf]'")

from safetensors.torch import load_file, save_file  # noqa: E402

RANK, ALPHA = 3, 5
ATTENTION = ("q_proj", "v_proj")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {"both": BOTH, "gate_up": BOTH[:1], "down": BOTH[1:]}
MODELS = ("qwen3_moe", "mixtral", "gpt_oss")
INTERMEDIATE = {"qwen3_moe": 24, "mixtral": 48, "gpt_oss": 48}
EXPERTS_OF_LAYER = "model.layers.{}.mlp.experts"


def tiny(model_type: str) -> Any:
    """The same weights every time, also those that `build` leaves as the class draws them (the sinks of gpt-oss)."""
    torch.manual_seed(0)
    return build(model_type)


def lora_config(parameters: list[str], **changes: Any) -> Any:
    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(ATTENTION), "target_parameters": parameters}
    return peft.LoraConfig(**{**values, **changes})


def make_adapter(folder: Path, model_type: str, parameters: list[str], **changes: Any) -> Tensor:
    """Saves an adapter with random factors as PEFT saves it; the logits that PEFT computes with it."""
    model = peft.get_peft_model(tiny(model_type), lora_config(parameters, **changes)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return logits_of(model)


def peft_logits(folder: Path, model_type: str) -> Tensor:
    """The logits of plain PEFT with the adapter of the folder, each of whose tensors must have found its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it for
        # PEFT 0.21 says so of every pattern that names a parameter, and heeds it all the same
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match any targeted module")
        model = peft.PeftModel.from_pretrained(tiny(model_type), folder).eval()
        status = model.load_adapter(str(folder), "again")
    assert not status.unexpected_keys
    assert not [key for key in status.missing_keys if "lora_" in key]
    return logits_of(model)


def delta(factors: Any, name: str) -> Tensor | None:
    a, b = getattr(factors, f"{name}_lora_a"), getattr(factors, f"{name}_lora_b")
    return None if a is None else factors.scaling * torch.einsum("eor,eri->eoi", b, a)


def merged_logits(model_type: str, adapter: Adapter) -> Tensor:
    """The model with W + scaling · B @ A in place of W, from the factors of `adapter`."""
    model = tiny(model_type)
    with torch.no_grad():
        for name, factors in adapter.experts.items():
            experts: Any = model.get_submodule(name)
            gated = hasattr(experts, "gate_up_proj")
            stored = (experts.gate_up_proj if gated else experts.up_proj, experts.down_proj)
            up, down = (weight.mT if experts.is_transposed else weight for weight in stored)  # views: (E, out, in)
            rows = {"up": slice(None)}
            if gated and experts.is_concatenated:
                rows = {"gate": slice(up.shape[1] // 2), "up": slice(up.shape[1] // 2, None)}
            elif gated:
                rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            for part, own_rows in rows.items():
                if (change := delta(factors, part)) is not None:
                    up[:, own_rows] += change
            if (change := delta(factors, "down")) is not None:
                down += change
        for key, a in adapter.others.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                scaling = ALPHA / (math.sqrt(RANK) if adapter.config.get("use_rslora") else RANK)
                model.get_submodule(name).weight += (
                    scaling * adapter.others[key.replace("lora_A", "lora_B")] @ a  # type: ignore[operator]
                )
    return logits_of(model)


def layouts(model_type: str) -> dict[str, ExpertsLayout]:
    return layouts_of(tiny(model_type))


def assert_same_factors(ours: Adapter, others: Adapter) -> None:
    assert ours.experts.keys() == others.experts.keys()
    for module, factors in ours.experts.items():
        expected = others.experts[module]
        assert factors.scaling == expected.scaling
        assert factors.tensors().keys() == expected.tensors().keys()
        for name, tensor in factors.tensors().items():
            assert torch.equal(tensor, expected.tensors()[name]), f"{module} {name}"
    assert ours.others.keys() == others.others.keys()
    assert all(torch.equal(tensor, others.others[key]) for key, tensor in ours.others.items())


def random_factors(model_type: str, ranks: dict[str, int], seed: int = 0, scaling: float = 1.5) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)
    intermediate = INTERMEDIATE[model_type]
    factors = {}
    for name, rank in ranks.items():
        fan_in, fan_out = (intermediate, HIDDEN) if name == "down" else (HIDDEN, intermediate)
        factors[f"{name}_lora_a"] = 0.4 * torch.randn(EXPERTS, rank, fan_in, generator=generator)
        factors[f"{name}_lora_b"] = 0.4 * torch.randn(EXPERTS, fan_out, rank, generator=generator)
    return LoraFactors(**factors, scaling=scaling)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({key: value.contiguous() for key, value in change(load_file(path)).items()}, path)


V4_NAMES = {
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
}


def make_v4_adapter(folder: Path, model_type: str, ranks: dict[str, int], **changes: Any) -> Adapter:
    """One LoRA per expert and projection, under the names of transformers 4; the adapter it stands for."""
    parent, names = V4_NAMES[model_type]
    experts = {
        EXPERTS_OF_LAYER.format(layer): random_factors(model_type, ranks, layer, ALPHA / RANK) for layer in range(2)
    }
    tensors = {
        f"base_model.model.{module.replace('mlp', parent)}.{e}.{names[part]}.lora_{factor.upper()}.weight": own
        for module, factors in experts.items()
        for part in ranks
        for factor in "ab"
        for e, own in enumerate(factors.tensors()[f"{part}_lora_{factor}"])
    }
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    modules = [names[part] for part in ranks]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(experts)
