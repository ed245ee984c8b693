"""Small layers of every kind and their gradients."""

import torch

from amoeba import MoE, MoEConfig, RouterConfig

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 24, 20, 8, 3

ROUTERS = {
    "softmax": RouterConfig(NUM_EXPERTS, TOP_K, renormalize=False),
    "softmax_renormalized": RouterConfig(NUM_EXPERTS, TOP_K, scaling_factor=1.7),
    "softmax_capacity": RouterConfig(NUM_EXPERTS, TOP_K, renormalize=False, capacity_factor=0.8),
    "sigmoid": RouterConfig(NUM_EXPERTS, TOP_K, score="sigmoid", renormalize=False),
    "deepseek_v3": RouterConfig(
        NUM_EXPERTS, TOP_K, score="sigmoid", n_group=4, topk_group=2, selection_bias=True, scaling_factor=2.5
    ),
    "topk_softmax": RouterConfig(NUM_EXPERTS, TOP_K, score="topk_softmax"),
}
PLAIN = MoEConfig(HIDDEN, INTERMEDIATE, ROUTERS["softmax_renormalized"])
FULL = MoEConfig(HIDDEN, INTERMEDIATE, ROUTERS["deepseek_v3"], bias=True, shared_intermediate_size=28)


def make_layer(config=FULL, dtype=torch.float32, **options):
    """With weights far larger than at initialisation, biases that are not 0, and no near ties."""
    layer = MoE(config, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*layer.parameters(), *layer.gate.buffers()):
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return layer


def make_x(*shape, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def gradients(layer, x, dy):
    """Output and gradients of one backward, by name."""
    x = x.detach().requires_grad_()
    y = layer(x)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"y": y.detach()} | dict(zip(names, found, strict=True))
