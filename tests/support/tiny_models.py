"""Builds tiny random models of every transformers type that has experts, from their config classes alone.

    model = build("qwen3_moe")             # two layers, fp32, eval mode, the same weights every time
    print(model_parity(model))             # "amoeba" against "eager": output, and the gradient of every parameter

A config is shrunk by the names of its fields: SMALL says what a name becomes wherever it appears, OVERRIDES what one
type needs beside that.
"""

import copy
import dataclasses
import functools
import importlib
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import amoeba

HIDDEN, VOCABULARY, EXPERTS, LAYERS = 32, 64, 6, 2
TOLERANCE = 1e-5  # relative L2, fp32

SMALL: dict[str, Any] = {
    # widths
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "router_hidden_size": 16,
    # experts, in every layer
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"] * LAYERS,
    # depth, vocabulary
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "index_head_dim": 8,
    "index_n_heads": 16,  # scores are cut at 0: with few heads many are equal, and which of them come first is open
    "index_topk": 4,
    # linear attention and state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"], "o_lora_rank": 8, "o_groups": 2},
    "diffusion_gemma": {"global_head_dim": 8},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]},
    },
    "gemma4": {
        "enable_moe_block": True,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "glm5_next": {**_HYBRID, "qk_rope_head_dim": 0, "index_kpool": 2},
    "granitemoehybrid": _HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    # its masks know no window, but the cache of transformers would
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 40, "sliding_window": None},
    "qwen4_exp": {
        **_HYBRID,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}

_DECORATED = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)", re.MULTILINE)

amoeba.register()


class Outcome(NamedTuple):
    output: Tensor
    gradients: dict[str, Tensor | None]


class Parity(NamedTuple):
    output_error: float
    gradient_error: float
    worst: str
    noisy: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return max(self.output_error, self.gradient_error) < TOLERANCE


@functools.cache
def experts_classes() -> dict[str, tuple[str, ...]]:
    """Model type (the name of its folder) -> its classes under `use_experts_implementation`."""
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name: tuple(_DECORATED.findall(path.read_text())) for path in models.glob("*/modeling_*.py")}
    return {name: classes for name, classes in sorted(found.items()) if classes}


def modeling_module(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def tiny_config(config_class: type[PreTrainedConfig], model_type: str, **changes: Any) -> PreTrainedConfig:
    fields = _fields(config_class)
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return config_class(**{**values, **OVERRIDES.get(model_type, {}), **changes})


def _fields(config_class: Any) -> set[str]:
    return (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )


def text_models(model_type: str) -> list[tuple[type[PreTrainedModel], type[PreTrainedConfig]]]:
    """The classes that take token ids, with their configs; those with a head over the vocabulary first."""
    module = modeling_module(model_type)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    models = [c for c in own if issubclass(c, PreTrainedModel) and not c.__name__.endswith("PreTrainedModel")]
    pairs = [(c, typing.get_type_hints(c.__init__).get("config", c.config_class)) for c in models]
    flat = [(c, config) for c, config in pairs if {"vocab_size", "hidden_size"} <= _fields(config)]
    return sorted(flat, key=lambda p: (not p[0].__name__.endswith("ForCausalLM"), not p[0].__name__.endswith("Model")))


def needs(model_type: str) -> str:
    """The name again; the test is skipped where this transformers has no such model."""
    if model_type not in experts_classes():
        pytest.skip(f"transformers {transformers.__version__} has no {model_type} with experts")
    return model_type


def build(model_type: str, experts_class: str | None = None, **changes: Any) -> PreTrainedModel:
    """The first text model of the type that has experts (of this class, where one is named)."""
    for model_class, config_class in text_models(model_type):
        model = _made(model_class, tiny_config(config_class, model_type, **changes))
        if any(experts_class in (None, type(module).__name__) for module in experts_of(model)):
            return randomise(model).eval()
    raise LookupError(f"{model_type}: no text model with {experts_class or 'experts'}")


def build_experts(model_type: str, experts_class: str, **changes: Any) -> nn.Module:
    """An experts module alone."""
    for _, config_class in text_models(model_type):
        config = tiny_config(config_class, model_type, **changes)
        return randomise(_made(getattr(modeling_module(model_type), experts_class), config)).eval()
    raise LookupError(f"{model_type}: no config for {experts_class}")


def _made(module_class: Any, config: PreTrainedConfig) -> Any:
    """The same every time: `randomise` only adds to vectors, some of which (gpt-oss's sinks) begin at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module_class(config)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def randomise(module: Any, seed: int = 0) -> Any:
    """Weights of a size that keeps gradients well above rounding; norms stay near 1 and biases near 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.7 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(noise * 0.1)
    return module


def token_ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits


def run(model: PreTrainedModel, implementation: str, ids: Tensor | None = None) -> Outcome:
    """Forward and backward of a random linear function of the output."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    answer = model(input_ids=token_ids() if ids is None else ids, use_cache=False)
    output = answer.logits if "logits" in answer else answer.last_hidden_state
    return _backward(output, dict(model.named_parameters()))


def run_experts(module: Any, implementation: str, inputs: tuple[Tensor, Tensor, Tensor], call: Any = None) -> Outcome:
    """The same for an experts module alone, or for `call`; hidden_states and top_k_weights count as parameters."""
    module.config._experts_implementation = implementation
    module.zero_grad()
    hidden_states, top_k_index, top_k_weights = inputs
    leaves = {"hidden_states": hidden_states.detach().requires_grad_(), "top_k_weights": top_k_weights.detach()}
    leaves["top_k_weights"].requires_grad_()
    output = (module if call is None else call)(leaves["hidden_states"], top_k_index, leaves["top_k_weights"])
    return _backward(output, {**leaves, **dict(module.named_parameters())})


def experts_inputs(tokens: int, top_k: int, experts: int = EXPERTS, hidden: int = HIDDEN) -> tuple:
    generator = torch.Generator().manual_seed(100 * tokens + top_k)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.topk(top_k, dim=-1)
    return torch.randn(tokens, hidden, generator=generator), index, weights


def _backward(output: Tensor, leaves: dict[str, Tensor]) -> Outcome:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * direction.to(output)).sum().backward()
    return Outcome(output.detach(), {name: leaf.grad for name, leaf in leaves.items()})


def relative(value: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    difference, size = (value.double() - expected.double()).norm().item(), expected.double().norm().item()
    return difference / size if size else difference


def parity(ours: Outcome, eager: Outcome, exact: Callable[[], Outcome]) -> Parity:
    """Errors of ours against eager, parameter by parameter.

    A gradient that cancels to rounding noise has no meaningful error against another fp32 run. Such a parameter, and
    only such, is compared with the fp64 run `exact()` instead, and may be off by three times what eager is off.
    """
    assert ours.gradients.keys() == eager.gradients.keys()
    errors: dict[str, float] = {}
    noisy = []
    for name, expected in eager.gradients.items():
        found = ours.gradients[name]
        assert (found is None) == (expected is None), (
            f"{name}: gradient {found is not None}, eager {expected is not None}"
        )
        if found is None or expected is None:
            continue
        errors[name] = relative(found, expected)
        if errors[name] >= TOLERANCE:
            truth = exact().gradients[name]
            assert truth is not None
            if relative(found, truth) <= 3 * relative(expected, truth):
                noisy.append(name)
                del errors[name]
    worst = max(errors, key=errors.__getitem__)
    return Parity(relative(ours.output, eager.output), errors[worst], worst, tuple(noisy))


def model_parity(model: PreTrainedModel) -> Parity:
    exact = functools.cache(lambda: run(copy.deepcopy(model).double(), "eager"))
    eager = run(model, "eager")
    return parity(run(model, "amoeba"), eager, exact)


def experts_parity(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> Parity:
    hidden_states, index, weights = inputs
    exact = functools.cache(
        lambda: run_experts(copy.deepcopy(module).double(), "eager", (hidden_states.double(), index, weights.double()))
    )
    eager = run_experts(module, "eager", inputs)
    return parity(run_experts(module, "amoeba", inputs), eager, exact)


END = "<end>"


def byte_tokenizer() -> Any:
    """One token per byte, so that every character beyond ASCII is torn between tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def save_byte_tokenizer(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder)


def lora_gradients(model: Any, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    """Logits, and gradients of factors that are no zeros. options: of lora.attach."""
    from amoeba import lora

    lora.attach(model, r=3, alpha=6, **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert sum("layers.0" in name and "experts" in name for name in gradients) >= 5
    return {"logits": output.logits.detach(), **gradients}
