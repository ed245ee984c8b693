"""A layer in bf16 with its packed experts, for their tests.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

import torch

from amoeba import Activation, ExpertWeights, Routing, experts
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu.packed_experts import pack_experts
from amoeba.proof.reference import experts as reference

T, K, E, H, I, R = 37, 2, 5, 64, 199, 4
SCALING = 1.5
INTERLEAVED = Activation("silu", alpha=1.702, up_shift=1.0, interleaved=True)
PLAIN = Activation("gelu", gated=False)


class PackedLayer:
    """All tensors by name; the factors, x and the routing weights want gradients."""

    def __init__(self, activation=None, bias=True, inner=I, tokens=T, seed=0):
        self.activation = activation or Activation()
        self.generator = torch.Generator().manual_seed(seed)
        width = self.activation.width(inner)
        self.weights = ExpertWeights(
            self.normal(E, width, H, fan_in=H),
            self.normal(E, H, inner, fan_in=inner),
            self.normal(E, width, fan_in=4) if bias else None,
            self.normal(E, H, fan_in=4) if bias else None,
            self.activation,
        )
        factors = {}
        for name in LORA_NAMES:
            if self.activation.gated or not name.startswith("gate"):
                fan_in, fan_out = (inner, H) if name.startswith("down") else (H, inner)
                shape = (E, R, fan_in) if name.endswith("a") else (E, fan_out, R)
                # small beside the base, as factors are
                fan = shape[2] if name.endswith("a") else 16 * R
                factors[name] = self.normal(*shape, fan_in=fan).requires_grad_()
        self.lora = LoraFactors(**factors, scaling=SCALING)
        # expert 3 gets nothing, and some slots belong to nobody
        drawn = torch.randint(0, E - 1, (tokens, K), generator=self.generator)
        self.expert_TK = torch.where(drawn == 3, E - 1, drawn)
        self.expert_TK[::5, 1] = E
        self.x_TH = self.normal(tokens, H, fan_in=1).requires_grad_()
        self.weight_TK = (torch.rand(tokens, K, generator=self.generator) + 0.1).requires_grad_()
        self.dy_TH = self.normal(tokens, H, fan_in=1)

    def normal(self, *shape, fan_in):
        return (torch.randn(shape, generator=self.generator) / fan_in**0.5).bfloat16()

    def pack(self, kind="bf16", nodes=1, backward=None):
        return pack_experts(self.weights, kind, nodes, backward=backward)

    @property
    def routing(self):
        return Routing(self.expert_TK, self.weight_TK)

    def wanted(self):
        return {"x": self.x_TH, "weight": self.weight_TK} | self.lora.tensors()

    def run(self, packed, **options):
        return experts(self.x_TH, self.routing, packed, lora=self.lora, **options)

    def found(self, packed, **options):
        """Output and gradients by name, by the seam under autograd."""
        y_TH = self.run(packed, **options)
        gradients = torch.autograd.grad(y_TH, list(self.wanted().values()), self.dy_TH)
        return {"output": y_TH.detach()} | dict(zip(self.wanted(), gradients, strict=True))

    def truth(self):
        """The same in fp64, by the reference."""

        def wide(tensor):
            return None if tensor is None else tensor.detach().double()

        weights = ExpertWeights(*map(wide, self.weights.tensors()), self.activation)
        lora = LoraFactors(*map(wide, self.lora.six()), SCALING)
        problem = wide(self.x_TH), self.expert_TK, wide(self.weight_TK), weights, lora
        gradients = reference.experts_backward(wide(self.dy_TH), *problem)
        return {"output": reference.experts_forward(*problem)} | {name: gradients[name] for name in self.wanted()}


def error(found, truth):
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm() / truth.norm())


def assert_close(found, truth, output=5e-3, gradients=1e-2):
    assert found.keys() == truth.keys()
    errors = {name: error(found[name], truth[name]) for name in truth}
    assert all(value < (output if name == "output" else gradients) for name, value in errors.items()), errors
