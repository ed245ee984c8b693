"""The models that are measured, by name, and what is asked of them.

    problem = Problem(SIZES["1b"], "training", torch.device("cuda"))
    model = problem.model("amoeba", torch.bfloat16)      # random weights, made on the device
    ids = problem.ids(problem.batch.rows)

Dimensions are those of models that people train and run; the weights are drawn, the same for all candidates of a dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.jobs.presets import PRESETS

Kind = Literal["training", "lora", "decode"]
KINDS: tuple[Kind, ...] = ("training", "lora", "decode")
LORA_RANK, LORA_ALPHA = 16, 32
LEARNING_RATE, MOST_NORM = 1e-4, 1.0
DECODE_ROWS = (1, 8)

Step = Callable[[], Tensor]
Decode = Callable[[Tensor, int], Tensor]


class Stage(ExitStack):
    """What a candidate has set up and is undone once it was measured, and what it has to say about itself.

    said:    sentences for the document, as that a part of it was not possible.
    compare: (prompts, its tokens) -> whether the plain loop chooses the same, an Agreement; for decodes of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.compare: Callable[[Tensor, Tensor], Any] | None = None


class Batch(NamedTuple):
    """length: tokens of a row, all of them trained on; of a prompt, where new tokens are decoded after it."""

    rows: int
    length: int
    new_tokens: int = 0


@dataclass(frozen=True)
class ModelSize:
    """batches: for each kind that is measured on this model."""

    name: str
    model_type: str
    settings: dict[str, Any]
    batches: dict[Kind, Batch]
    about: str


@dataclass(frozen=True)
class Problem:
    size: ModelSize
    kind: Kind
    device: torch.device
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", self.size.batches[self.kind])

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch.rows * self.batch.length

    @property
    def dtype(self) -> torch.dtype:
        """In which frozen weights lie and the products are counted."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def config(self) -> Any:
        from transformers import AutoConfig

        settings = self.size.settings | {"use_cache": self.kind == "decode", "output_router_logits": False}
        return AutoConfig.for_model(self.size.model_type, **settings)

    def model(self, experts: str, dtype: torch.dtype, device: torch.device | None = None) -> Any:
        """device: that of the problem, if it is not another ("meta": sizes without numbers)."""
        from transformers import AutoModelForCausalLM

        from amoeba.integrations.transformers import register

        register()
        torch.manual_seed(0)
        with self.device if device is None else device:
            return AutoModelForCausalLM.from_config(
                self.config(),
                experts_implementation=experts,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=False,
            )

    def ids(self, rows: int) -> Tensor:
        """(rows, length)"""
        generator = torch.Generator().manual_seed(1)
        size = (rows, self.batch.length)
        ids = torch.randint(
            0, self.size.settings["vocab_size"], size, generator=generator, dtype=torch.int64, device="cpu"
        )
        return ids.to(self.device)

    def flops_per_token(self) -> float:
        """Of a training step, as the progress lines of a run count them; of a LoRA step those of the frozen model."""
        from amoeba.jobs.model_cost import training_flops_per_token

        model = self.model("eager", torch.bfloat16, torch.device("meta"))
        model.requires_grad_(self.kind == "training")
        return training_flops_per_token(model, self.batch.length)

    def parameters(self) -> int:
        return sum(each.numel() for each in self.model("eager", torch.bfloat16, torch.device("meta")).parameters())


def _qwen3(hidden: int, layers: int, heads: int, groups: int, head: int, inner: int, experts: int, top_k: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "vocab_size": 32768,
    }


_ALL = (
    ModelSize(
        "tiny",
        "qwen3_moe",
        # weights as large as the width allows: with those of wide models its layers add next to nothing to a token
        _qwen3(64, 2, 4, 2, 16, 32, 8, 2) | {"vocab_size": 256, "intermediate_size": 64, "initializer_range": 0.2},
        {"training": Batch(2, 32), "lora": Batch(2, 32), "decode": Batch(1, 8, 8)},
        "for any machine; says that the suite works, and little about speed",
    ),
    ModelSize(
        "120m",
        "qwen3_moe",
        PRESETS["120m"].model | {"vocab_size": 32768, "max_position_embeddings": 4096},
        {"training": Batch(32, 1024)},
        "the preset of amoeba train",
    ),
    ModelSize(
        "1b",
        "qwen3_moe",
        _qwen3(1024, 12, 16, 4, 64, 512, 64, 8),
        {"training": Batch(32, 1024), "lora": Batch(16, 1024), "decode": Batch(1, 128, 64)},
        "1.27B parameters",
    ),
    ModelSize(
        "olmoe",
        "olmoe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
            "vocab_size": 50304,
        },
        {"training": Batch(16, 1024), "lora": Batch(8, 1024)},
        "OLMoE-7B's dimensions, 6.9B parameters",
    ),
    ModelSize(
        "qwen3_30b",
        "qwen3_moe",
        _qwen3(2048, 48, 32, 4, 128, 768, 128, 8)
        | {"vocab_size": 151936, "intermediate_size": 6144, "tie_word_embeddings": False},
        {"decode": Batch(1, 128, 32)},
        "Qwen3-30B-A3B's dimensions",
    ),
)
_SIX_LAYERS = tuple(
    ModelSize(
        f"qwen3_6_layers_{rows}",
        "qwen3_moe",
        _qwen3(2048, 6, 32, 4, 128, 768, 128, 8) | {"intermediate_size": 6144},
        {"lora": Batch(rows, 2048)},
        f"six layers of Qwen3-30B-A3B's dimensions, {rows} rows",
    )
    for rows in (2, 8)
)
_QWEN3_NEXT = ModelSize(
    "qwen3_next_4_layers",
    "qwen3_next",
    {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "vocab_size": 32768,
        "max_position_embeddings": 4096,
    },
    {"lora": Batch(2, 2048)},
    "four layers of Qwen3-Next-80B-A3B's dimensions, three of them gated delta networks",
)
SIZES = {size.name: size for size in (*_ALL, *_SIX_LAYERS, _QWEN3_NEXT)}


def choose_problems(sizes: list[str], kind: str | None, device: torch.device) -> list[Problem]:
    """kind: None for all."""
    for name in sizes:
        if name not in SIZES:
            raise bad_value("--shape", f"one of {', '.join(SIZES)}", repr(name), "leave it out for all")
    if kind is not None and kind not in KINDS:
        raise bad_value("--pass", f"one of {', '.join(KINDS)}", repr(kind), "leave it out for all")
    default = [name for name in SIZES if name != "tiny"] if device.type == "cuda" else ["tiny"]
    kinds = [each for each in KINDS if kind in (each, None)]
    found = [
        Problem(SIZES[name], each, device) for name in sizes or default for each in kinds if each in SIZES[name].batches
    ]
    if not found:
        measured = "; ".join(f"{name}: {', '.join(size.batches)}" for name, size in SIZES.items())
        raise bad_value(
            "--pass", f"what is measured ({measured})", f"{kind!r} of {', '.join(sizes)}", "choose one of these"
        )
    return found
