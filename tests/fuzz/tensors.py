"""A case in numbers: every tensor of the call, with the strides its layout says, inside memory that is watched.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    made = make(case)
    made.tensors["gate_up"], made.dy_TH, made.expert_TK
    made.touched()            # names of tensors that the call wrote to, or around

What lies between and around a tensor's elements is NaN, so that who reads there shows it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .case import Case

# The last ones turn into an expert's id, or into a place in memory, where somebody cuts them down to 32 bits.
OUTSIDE_32 = (-1, -(2**31), 2**31 - 1)
OUTSIDE_64 = (*OUTSIDE_32, 2**31, 2**32, 2**32 + 1, 2**40, -(2**40) + 1, 2**63 - 1, -(2**63))


@dataclass(eq=False)
class Made:
    """The inputs of one call; leaves of autograd where the case wants a gradient."""

    expert_TK: Tensor
    dy_TH: Tensor
    tensors: dict[str, Tensor]  # x, weight, gate_up, down, and biases and factors where there are any
    _memory: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what a tensor lies in, and a copy of it

    def touched(self) -> list[str]:
        return [name for name, (now, before) in self._memory.items() if not torch.equal(bits(now), before)]


def make(case: Case) -> Made:
    # A case is the same one, and in the same place, whatever the defaults of the process are.
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(case.seed)
        values = _values(case, generator)
        _inject_nan(case, values, generator)
    memory: dict[str, tuple[Tensor, Tensor]] = {}
    tensors = {}
    for name, value in values.items():
        on_cpu = case.packed and name not in ("x", "weight", "expert", "dy")
        whole, tensor = _laid_out(value, case.layouts.get(name, "plain"), generator, "cpu" if on_cpu else case.device)
        memory[name] = whole, bits(whole)
        tensors[name] = tensor
    expert_TK, dy_TH = tensors.pop("expert"), tensors.pop("dy")
    fixed = ("gate_up", "down", "gate_up_bias", "down_bias") if case.frozen else ()
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in case.wanted and name not in fixed)
    if case.shared_a and "gate_lora_a" in tensors:
        tensors["up_lora_a"] = tensors["gate_lora_a"]
    return Made(expert_TK, dy_TH, tensors, memory)


def _values(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    tokens, hidden, inner, experts = case.tokens, case.hidden, case.intermediate, case.experts
    width = case.activation.width(inner)
    dtype = getattr(torch, case.dtype)
    x_dtype = torch.bfloat16 if case.packed and case.mode != "autocast" else dtype

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def grid(*shape: int, scale: float = 1.0, most: int = 1) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).double() * scale

    values = {"expert": _expert_ids(case, generator), "weight": _scales(case, generator)}
    if case.has_kink:
        # Where the slope jumps, an h that was rounded to the other side is nobody's error, and drowns all others. So x
        # and W1 hold a number, its negative and 0 alone, and every sum of their products is exact in any order and in
        # any dtype: an even multiple of unit, with a bias an odd one. The limit is an even one.
        values["x"], values["gate_up"] = grid(tokens, hidden), grid(experts, width, hidden, scale=2 * case.unit)
        bias_EJ = grid(experts, width, scale=2 * case.unit, most=2) + case.unit
    else:
        values["x"], values["gate_up"] = normal(tokens, hidden), normal(experts, width, hidden, scale=hidden**-0.5)
        bias_EJ = normal(experts, width, scale=0.5)
    values["down"] = normal(experts, hidden, inner, scale=inner**-0.5)
    if case.quantised:
        parts = 2 if case.gated and not case.interleaved else 1
        if not case.has_kink:
            values["gate_up"] = _representable(case, experts, parts, width, hidden, generator)
        values["down"] = _representable(case, experts, 1, hidden, inner, generator)
    if case.gate_up_bias:
        values["gate_up_bias"] = bias_EJ
    if case.down_bias:
        values["down_bias"] = normal(experts, hidden, scale=0.5)
    for name, rank in case.ranks.items():
        fan_in, fan_out = (inner, hidden) if name == "down" else (hidden, inner)
        if case.has_kink and name != "down":
            # up to four of x's numbers each: scaling·x·Aᵀ is a small whole number
            a_ERI = torch.zeros(experts, rank, fan_in, dtype=torch.float64)
            place = torch.rand(a_ERI.shape, generator=generator, dtype=torch.float64).argsort(-1)[..., :4]
            sign = torch.randint(2, place.shape, generator=generator).double() * 2 - 1
            values[f"{name}_lora_a"] = a_ERI.scatter_(-1, place, sign / case.scaling)
            values[f"{name}_lora_b"] = grid(experts, fan_out, rank, scale=2 * case.unit)
        else:
            values[f"{name}_lora_a"] = normal(experts, rank, fan_in, scale=fan_in**-0.5)
            values[f"{name}_lora_b"] = normal(experts, fan_out, rank, scale=0.5 * rank**-0.5)
    if case.shared_a:
        values.pop("up_lora_a", None)
    values["dy"] = normal(tokens, hidden)
    dtypes = {"weight": getattr(torch, case.scale_dtype), "expert": getattr(torch, case.id_dtype)}
    dtypes |= dict.fromkeys(("x", "dy"), x_dtype)
    factor_dtype = case.computes_in if case.factor_dtype == "same" else torch.float32
    if factor_dtype == torch.float32 and dtype == torch.float64:
        factor_dtype = torch.float64
    for name, value in values.items():
        if value.is_floating_point() and name != "weight":
            value = value.to(case.computes_in)
        values[name] = value.to(factor_dtype if "lora" in name else dtypes.get(name, dtype))
    if case.mode == "autocast":
        values["dy"] = values["dy"].to(torch.bfloat16)  # as y
    return values


# Rows and columns of a block, the numbers an element can be, the smallest exponent of a block's scale.
_BLOCKS = {"fp8-weights": (128, 128), "mxfp8-weights": (1, 32), "mxfp4-weights": (1, 32), "nvfp4-weights": (1, 16)}
_E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3 = tuple(mantissa * 2.0**exponent for exponent in range(-4, 9) for mantissa in (1, 1.125, 1.5, 1.75))


def _representable(case: Case, experts: int, parts: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Numbers that the format holds exactly, so that quantising them changes nothing and the truth needs no decoder.

    Each block holds its element type's largest number: its scale follows from that, as a power of two. A block of NVFP4
    has a scale of its own, and one block of the matrix the largest there is.
    """

    def choice(numbers: tuple[float, ...], *shape: int) -> Tensor:
        table = torch.tensor(numbers, dtype=torch.float64)
        sign = torch.randint(2, shape, generator=generator).double() * 2 - 1
        return table[torch.randint(len(numbers), shape, generator=generator)] * sign

    def power(lowest: int, highest: int, *shape: int) -> Tensor:
        return torch.exp2(torch.randint(lowest, highest + 1, shape, generator=generator).double())

    block_rows, block_columns = _BLOCKS[case.placement]
    of_part = rows // parts
    down, across = -(-of_part // block_rows), -(-columns // block_columns)
    elements = _E2M1 if case.placement in ("mxfp4-weights", "nvfp4-weights") else _E4M3
    largest = max(elements)
    blocks = choice(elements, experts, parts, down, block_rows, across, block_columns)
    blocks[:, :, :, 0, :, 0] = choice((largest,), experts, parts, down, across)
    size = 2.0 ** -round(math.log2(largest * max(columns, 1) ** 0.5))
    if case.placement == "nvfp4-weights":
        scale = power(-3, 8, experts, parts, down, across)
        scale = torch.where(scale == 256, 448.0, scale)
        scale[:, :1, :1, :1] = 448.0
        scale = scale * size / 256
    else:
        scale = power(-1, 1, experts, parts, down, across) * size
    blocks = blocks * scale[:, :, :, None, :, None]
    whole = blocks.reshape(experts, parts, down * block_rows, across * block_columns)
    return whole[:, :, :of_part, :columns].reshape(experts, rows, columns)


def _expert_ids(case: Case, generator: torch.Generator) -> Tensor:
    shape, experts = (case.tokens, case.top_k), case.experts
    any_TK = torch.randint(experts, shape, generator=generator)
    if case.ids == "one":
        return torch.full(shape, experts // 2)
    if case.ids == "duplicates":
        return any_TK[:, :1].expand(shape)
    if case.ids == "any":
        return any_TK
    expert_TK = torch.rand(case.tokens, experts, generator=generator).argsort(1)[:, : case.top_k]
    if expert_TK.shape != shape:
        expert_TK = any_TK
    if case.ids in ("sentinels", "nobody"):
        outside = (experts, experts + 3, *(OUTSIDE_32 if case.id_dtype == "int32" else OUTSIDE_64))
        drawn_TK = torch.tensor(outside)[torch.randint(len(outside), shape, generator=generator)]
        if case.ids == "nobody":
            return drawn_TK
        expert_TK = expert_TK.where(torch.rand(shape, generator=generator) < 0.6, drawn_TK)
    return expert_TK


def _scales(case: Case, generator: torch.Generator) -> Tensor:
    weight_TK = torch.rand(case.tokens, case.top_k, generator=generator, dtype=torch.float64) + 0.1
    special_TK = torch.rand(weight_TK.shape, generator=generator) < 0.5
    if case.scales == "zeros":
        return weight_TK.masked_fill(special_TK, 0)
    if case.scales == "negative":
        return weight_TK.where(special_TK, -weight_TK)
    # all of them, for beside a huge row nobody sees what is wrong with the others
    return weight_TK * {"plain": 1.0, "huge": 1e15, "tiny": 1e-20}[case.scales]


def _inject_nan(case: Case, values: dict[str, Tensor], generator: torch.Generator) -> None:
    value = values.get(case.nan)
    if value is not None and value.numel():
        value = values[case.nan] = value.contiguous()
        value.view(-1)[torch.randint(value.numel(), (1,), generator=generator)] = float(case.bad)


def _laid_out(value: Tensor, layout: str, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """(what it lies in, the tensor): the value as a view of memory that is filled with what nobody should read."""

    def around(*shape: int) -> Tensor:
        nothing = torch.nan if value.is_floating_point() else 1
        return torch.full(shape, nothing, dtype=value.dtype, device=device)

    dims = value.dim()
    if layout == "expanded":
        dim = int(torch.randint(dims, (1,), generator=generator))
        whole = value.narrow(dim, 0, min(value.shape[dim], 1)).contiguous().to(device, copy=True)
        return whole, whole.expand(value.shape)
    if layout == "sliced":
        whole = around(*(size + 3 for size in value.shape))
        tensor = whole[tuple(slice(1, 1 + size) for size in value.shape)]
    elif layout == "strided":
        whole = around(*value.shape[:-1], 2 * value.shape[-1])
        tensor = whole[..., ::2]
    elif layout == "offset":
        whole = around(value.numel() + 6)
        tensor = whole[3 : 3 + value.numel()].view(value.shape)
    else:
        order = list(range(dims))
        if layout == "transposed":
            order[-2:] = order[-1], order[-2]
        if layout == "permuted":
            order = torch.randperm(dims, generator=generator).tolist()
        whole = around(*(value.shape[dim] for dim in order))
        tensor = whole.permute([order.index(dim) for dim in range(dims)])
    tensor.copy_(value)
    return whole, tensor


def bits(tensor: Tensor) -> Tensor:
    """A copy of what it holds, byte by byte; also of a NaN, and of one number with the stride 0."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
