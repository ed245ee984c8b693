"""A layer small enough to be written out by hand, for the tests of what every backend has to do.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

import torch

from amoeba import Activation, ExpertWeights, Routing, experts
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.proof.reference.experts import activate

T, K, E, H, I = 13, 2, 4, 16, 24
SCALING = 1.7


def kernel_device():
    """Where our kernels run: on the GPU, or in Triton's interpreter (see running.py)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A small layer in fp32 whose tensors all want gradients."""

    def __init__(self, activation=None, bias=True, tokens=T, hidden=H, inner=I, expert_TK=None, rank=0):
        self.activation = activation or Activation()
        width = self.activation.width(inner)
        generator = torch.Generator().manual_seed(1)
        if expert_TK is None:
            expert_TK = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
        self.expert_TK = expert_TK
        self.tensors = {
            "x": normal(tokens, hidden, seed=2),
            "weight": torch.rand(expert_TK.shape, generator=generator) + 0.1,
            "gate_up": normal(E, width, hidden, seed=3) / hidden**0.5,
            "down": normal(E, hidden, inner, seed=4) / inner**0.5,
        }
        if bias:
            self.tensors |= {"gate_up_bias": normal(E, width, seed=5), "down_bias": normal(E, hidden, seed=6)}
        for name in LORA_NAMES if rank else ():
            if self.activation.gated or not name.startswith("gate"):
                fan_in, fan_out = (inner, hidden) if name.startswith("down") else (hidden, inner)
                shape = (E, rank, fan_in) if name.endswith("a") else (E, fan_out, rank)
                self.tensors[name] = normal(*shape, seed=8 + LORA_NAMES.index(name)) / shape[2] ** 0.5
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.dy_TH = normal(tokens, hidden, seed=7)

    def to(self, device):
        """Itself, with its tensors there."""
        self.tensors = {name: tensor.detach().to(device).requires_grad_() for name, tensor in self.tensors.items()}
        self.expert_TK, self.dy_TH = self.expert_TK.to(device), self.dy_TH.to(device)
        return self

    def weights(self, named):
        biases = named.get("gate_up_bias"), named.get("down_bias")
        return ExpertWeights(named["gate_up"], named["down"], *biases, self.activation)

    def lora(self, named):
        factors = {name: tensor for name, tensor in named.items() if name in LORA_NAMES}
        return LoraFactors(**factors, scaling=SCALING) if factors else None

    def run(self, backend, **changed):
        named = self.tensors | changed
        routing = Routing(self.expert_TK, named["weight"])
        return experts(named["x"], routing, self.weights(named), lora=self.lora(named), backend=backend)

    def gradients(self, backend, **changed):
        """Output and gradients by name."""
        named = self.tensors | changed
        y_TH = self.run(backend, **changed)
        return {"output": y_TH.detach()} | dict(
            zip(named, torch.autograd.grad(y_TH, list(named.values()), self.dy_TH), strict=True)
        )

    def expert_output(self, t, k):
        """y of one slot as its expert gives it, without the routing weight."""
        named = {name: tensor.detach() for name, tensor in self.tensors.items()}
        e = int(self.expert_TK[t, k])
        h = named["gate_up"][e] @ named["x"][t] + (named["gate_up_bias"][e] if "gate_up_bias" in named else 0)
        y = named["down"][e] @ activate(h, self.activation)
        return y + named["down_bias"][e] if "down_bias" in named else y
