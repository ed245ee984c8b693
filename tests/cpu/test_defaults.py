"""torch's default dtype and default device belong to the user: whatever they are, every path gives the same bits.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from packed_layer import PackedLayer
from torch import Tensor

from amoeba import MoE, MoEConfig, RouterConfig, Routing, experts
from amoeba.backends import cpu_fused
from amoeba.backends.custom_activation import experts_composed
from amoeba.cpu.packed_experts import pack_experts
from amoeba.integrations.place_experts import place_experts
from amoeba.routing.router import load_balance_loss, z_loss
from small_layer import Layer, kernel_device
from tiny_models import build

Found = dict[str, Tensor]

DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def differentiated(y: Tensor, named: dict[str, Tensor], dy: Tensor) -> Found:
    gradients = torch.autograd.grad(y, list(named.values()), dy)
    return {"output": y.detach(), **dict(zip(named, gradients, strict=True))}


def halves(layer: Layer) -> dict[str, Tensor]:
    return {name: t.detach().bfloat16().requires_grad_() for name, t in layer.tensors.items()}


def place_of(backend: str) -> torch.device:
    return kernel_device() if backend == "triton" else torch.device("cpu")


def decoding(backend: str, dtype: torch.dtype, rank: int) -> Callable[[], Found]:
    layer = Layer(tokens=2, rank=rank).to(place_of(backend))
    named = layer.tensors if dtype == torch.float32 else halves(layer)

    def run() -> Found:
        with torch.no_grad():
            return {"output": layer.run(backend, **named)}

    return run


def training(backend: str, dtype: torch.dtype, rank: int, tokens: int = 13) -> Callable[[], Found]:
    layer = Layer(tokens=tokens, rank=rank).to(place_of(backend))
    named = layer.tensors if dtype == torch.float32 else halves(layer)
    dy = layer.dy_TH.to(dtype)
    return lambda: differentiated(layer.run(backend, **named), named, dy)


def composed() -> Callable[[], Found]:
    layer = Layer(rank=3)
    named = layer.tensors

    def run() -> Found:
        weights = layer.weights(named)
        y = experts_composed(
            named["x"],
            Routing(layer.expert_TK, named["weight"]),
            *weights.tensors(),
            gate=lambda h: torch.nn.functional.silu(h[:, :24]) * h[:, 24:],
            lora=layer.lora(named),
        )
        return differentiated(y, named, layer.dy_TH)

    return run


def packed(kind: str, nodes: int) -> Callable[[], Found]:
    """Packed under the default, too."""
    layer = PackedLayer()
    named = {"x": layer.x_TH, "weight": layer.weight_TK, **layer.lora.tensors()}

    def run() -> Found:
        mine = pack_experts(layer.weights, kind, nodes)
        y = experts(layer.x_TH, Routing(layer.expert_TK, layer.weight_TK), mine, lora=layer.lora)
        found = differentiated(y, named, layer.dy_TH)
        with torch.no_grad():
            few = experts(layer.x_TH[:1], Routing(layer.expert_TK[:1], layer.weight_TK[:1]), mine, lora=layer.lora)
        return found | {"decoded": few}

    return run


def layer_training(score: str) -> Callable[[], Found]:
    router = RouterConfig(num_experts=4, top_k=2, score=score, capacity_factor=1.2, selection_bias=True, jitter=0.1)
    config = MoEConfig(16, 24, router, bias=True, shared_intermediate_size=8)
    layer = MoE(config, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    x = torch.randn(5, 7, 16, generator=generator).requires_grad_()

    def run() -> Found:
        torch.manual_seed(0)
        layer.statistics.reset()
        layer.gate.e_score_correction_bias.zero_()
        y, routing = layer(x, return_routing=True)
        loss = y.square().mean() + load_balance_loss(routing, 4) + z_loss(routing.logits_TE)
        found = differentiated(loss, {"x": x} | dict(layer.named_parameters()), torch.ones_like(loss))
        statistics = layer.statistics.summary()
        layer.update_balance(rate=0.1)
        return found | statistics | {"bias": layer.gate.e_score_correction_bias.clone()}

    return run


def generating(placement: str) -> Callable[[], Found]:
    model = build("qwen3_moe")
    model.set_experts_implementation("amoeba")
    place_experts(model, placement)
    ids = torch.arange(6).reshape(1, 6)

    def run() -> Found:
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return {"tokens": tokens}

    return run


FP32, BF16 = torch.float32, torch.bfloat16
PATHS: dict[str, Callable[[], Callable[[], Found]]] = {
    **{f"decode {name}": partial(decoding, name, FP32, 0) for name in ("cpu", "eager", "grouped", "triton")},
    "decode cpu with LoRA": partial(decoding, "cpu", FP32, 3),
    "decode cpu in bf16": partial(decoding, "cpu", BF16, 0),
    "decode cpu in bf16 with LoRA": partial(decoding, "cpu", BF16, 3),
    "decode eager in bf16": partial(decoding, "eager", BF16, 0),
    **{f"train {name}": partial(training, name, FP32, 3) for name in ("cpu", "eager", "grouped")},
    "train triton": partial(training, "triton", FP32, 0, tokens=3),
    "train cpu in bf16": partial(training, "cpu", BF16, 3),
    "train cpu fused in bf16": partial(training, "cpu", BF16, 3),
    "composed": composed,
    "packed in int8": partial(packed, "int8", 1),
    "packed in bf16 on two nodes": partial(packed, "bf16", 2),
    "layer with softmax": partial(layer_training, "softmax"),
    "layer with sigmoid": partial(layer_training, "sigmoid"),
    "generate": partial(generating, "resident"),
    "generate with packed experts": partial(generating, "cpu-int8"),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_same_bits_whatever_the_defaults_are(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fused" in path:  # as on a CPU that multiplies bf16
        monkeypatch.setattr(cpu_fused, "_multiplies_bf16", lambda: True)
    run = PATHS[path]()
    expected = run()
    assert expected and all(tensor.isfinite().all() for tensor in expected.values())
    for name, default in DEFAULTS.items():
        if path.startswith("generate") and name == "meta":
            continue  # transformers itself makes its masks there
        with default():
            found = run()
        assert found.keys() == expected.keys()
        for what, tensor in expected.items():
            assert found[what].dtype == tensor.dtype, f"{what} under {name}"
            assert found[what].device == tensor.device, f"{what} under {name}"
            assert torch.equal(found[what], tensor), f"{what} under {name} has other bits"
