"""Exact mode by the kernels of a GPU: in Triton's interpreter, in fp32; and on a GPU, where there is one."""

from typing import Any

import pytest
import torch
from test_exact_models import FAMILIES, differences, made, prompts, with_lora
from torch.utils._python_dispatch import TorchDispatchMode

import amoeba
from amoeba import ExpertWeights, LoraFactors, Routing
from amoeba.core.errors import BadValue
from amoeba.decoding import Decoder
from amoeba.decoding.step import Step
from amoeba.decoding.trial import host_decision
from amoeba.integrations.exact_mode import exact
from amoeba.kernels import exact as kernels
from amoeba.ops import exact as ops
from amoeba.precision import MXFP4
from amoeba.precision.quantised_experts import quantise_experts
from selection import quick, without_a_gpu_thorough
from tiny_models import relative

DTYPES = torch.float32, torch.bfloat16
# Relative L2, from fp64. In bf16 exact mode on a CPU has up to 1.1e-2 in logits and 3.4e-2 in a gradient.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run: on the GPU where there is one, in Triton's interpreter elsewhere."""
    monkeypatch.setattr(ops, "kernels_on", lambda device: kernels)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@quick(lambda family: family == "qwen3_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_training_have_the_same_bits(family: str, device: torch.device) -> None:
    model = made(family).to(device)
    with exact(model):
        assert differences(model, 17, 1) == [0, 0, 0]


@pytest.mark.parametrize("quantised", [False, True])
def test_a_token_of_experts_is_the_same_among_others(quantised: bool, device: torch.device) -> None:
    """In fp16, where tiles of few rows have another depth than those of many."""
    hidden, intermediate, experts, tokens = 224, 160, 3, 70
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).half().to(device)

    weights: Any = ExpertWeights(normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate))
    weights = quantise_experts(weights, MXFP4) if quantised else weights
    factors = [normal(experts, *shape) for shape in ((5, hidden), (intermediate, 5), (5, intermediate), (hidden, 5))]
    up_a, up_b, down_a, down_b = factors
    lora = LoraFactors(up_lora_a=up_a, up_lora_b=up_b, down_lora_a=down_a, down_lora_b=down_b, scaling=2.0)
    x, expert = normal(tokens, hidden) * 10, torch.arange(2 * tokens, device=device).view(tokens, 2) % experts
    weight = torch.rand(tokens, 2, generator=generator).to(device)

    def run(part: slice) -> torch.Tensor:
        return amoeba.experts(x[part], Routing(expert[part], weight[part]), weights, lora=lora, backend="exact")

    whole = run(slice(tokens))
    for first, count in ((0, 1), (1, 3), (4, 66)):
        assert torch.equal(run(slice(first, first + count)), whole[first : first + count])


def test_fp32_factors_are_rounded_where_they_are_read(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    experts, hidden, intermediate = 3, 64, 48
    weights = ExpertWeights(normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate))
    shapes = {"up_lora_a": (5, hidden), "up_lora_b": (intermediate, 5), "down_lora_a": (5, intermediate)}
    factors = {name: normal(experts, *shape, dtype=torch.float32) for name, shape in shapes.items()}
    factors["down_lora_b"] = normal(experts, hidden, 5, dtype=torch.float32)
    x, expert = normal(9, hidden), torch.arange(18, device=device).view(9, 2) % experts

    def run(dtype: torch.dtype) -> torch.Tensor:
        lora = LoraFactors(**{name: each.to(dtype) for name, each in factors.items()}, scaling=2.0)
        routing = Routing(expert, torch.ones(9, 2, device=device))
        return amoeba.experts(x, routing, weights, lora=lora, backend="exact")

    rounded = run(torch.float16)
    with Conversions() as seen:
        assert torch.equal(run(torch.float32), rounded)
    assert not seen.shapes & {tuple(each.shape) for each in factors.values()}


class Conversions(TorchDispatchMode):
    """Shapes of what torch converted to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and kwargs["dtype"] == torch.float16:
            self.shapes.add(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@quick(lambda family: family == "gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_waits_for_no_number_of_a_step(family: str, device: torch.device) -> None:
    model = made(family).to(device)
    with exact(model):
        decoder = Decoder(model, batch=2, length=40, capture=False, return_logprobs=True)
        list(decoder.generate(prompts(3, 2), 1))
        for tokens in (1, 16):
            assert host_decision(Step(model, decoder._rows, decoder._choose, tokens=tokens)) is None


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(1,), (64,), (63, 64, 65), (1, 65, 2, 17, 64, 3, 30, 7)], ids=str)
def test_so_they_have_at_every_length(family: str, lengths: tuple[int, ...], device: torch.device) -> None:
    model = made(family).to(device)
    with exact(model):
        assert differences(model, *lengths) == [0, 0, 0]


@without_a_gpu_thorough  # a token of experts with factors, of numbers and of codes, is the same among others: below
@pytest.mark.parametrize("placement", [None, "fp8-weights", "mxfp4-weights"])
def test_lora_and_quantised_experts(placement: str | None, device: torch.device) -> None:
    model = with_lora(made("qwen3_moe"), placement).to(device)
    with exact(model):
        assert differences(model, 17, 1) == [0, 0, 0]


@quick(lambda family, checkpointing: family == "gpt_oss" and checkpointing)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_fp64(family: str, checkpointing: bool, device: torch.device) -> None:
    check_against_fp64(made(family).to(device), checkpointing)


def check_against_fp64(model: Any, checkpointing: bool) -> None:
    """model: its values of parameters are taken; on a CPU the reference is computed there, too."""
    ids = torch.tensor([prompts(9)[0], prompts(10)[0][:9]])
    truth = made(model.config.model_type).double()
    truth.load_state_dict(model.state_dict())
    truth.set_experts_implementation("eager")
    wanted = truth(input_ids=ids, labels=ids)
    wanted.loss.backward()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with exact(model):
        found = model(input_ids=ids.to(model.device), labels=ids.to(model.device))
        found.loss.backward()
    limit = TOLERANCE[model.dtype]
    assert relative(found.logits.double().cpu(), wanted.logits) < limit
    for (name, got), of_truth in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert got.grad is not None, name
        assert relative(got.grad.double().cpu(), of_truth.grad) < limit, name


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lengths",
    [(1,), (63,), (64,), (65, 1, 17), (63, 64, 65, 500, 1, 2, 300, 7), tuple(range(1, 65))],
    ids=["1", "63", "64", "batch of 3", "batch of 8", "batch of 64"],
)
def test_same_bits_on_a_gpu(lengths: tuple[int, ...], family: str, dtype: torch.dtype, capture: bool) -> None:
    model = made(family, dtype).cuda()
    with exact(model):
        assert differences(model, *lengths, capture=capture) == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_it_they_differ_on_a_gpu(dtype: torch.dtype) -> None:
    assert max(differences(made("qwen3_moe", dtype).cuda(), 65, 1)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("placement", [None, "fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights"])
def test_lora_and_quantised_experts_on_a_gpu(placement: str | None, capture: bool) -> None:
    model = with_lora(made("qwen3_moe", torch.bfloat16), placement).cuda()
    with exact(model):
        assert differences(model, 65, 1, 17, capture=capture) == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_on_a_gpu(family: str, dtype: torch.dtype, checkpointing: bool) -> None:
    check_against_fp64(made(family, dtype).cuda(), checkpointing)


@pytest.mark.gpu
def test_an_exact_step_waits_for_nothing() -> None:
    model = made("qwen3_moe", torch.bfloat16).cuda()
    with exact(model):
        decoder = Decoder(model, batch=2, length=40)
        list(decoder.generate(prompts(5, 8), 4))
        torch.cuda.set_sync_debug_mode("error")
        try:
            Step(model, decoder._rows, decoder._choose)()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_decoder_whose_steps_were_captured_in_the_other_mode_is_refused() -> None:
    model = made("qwen3_moe", torch.bfloat16).cuda()
    decoder = Decoder(model, batch=1, length=40)
    list(decoder.generate(prompts(5), 4))
    with exact(model), pytest.raises(BadValue, match="Make a new Decoder"):
        list(decoder.generate(prompts(5), 4))


PARTS = (0, 1), (1, 8), (9, 17), (26, 64), (90, 500)  # first token and number of tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(2048, 4096), (4096, 2048), (2048, 128), (4096, 8), (768, 2050)])
def test_products_of_real_sizes_on_a_gpu(depth: int, columns: int, dtype: torch.dtype) -> None:
    """By tiles, and instructions, that differ with the number of rows."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, weight = (
        torch.randn(size, depth, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        for size in (2048, columns)
    )
    whole = ops.product(rows[None], weight.mT[None])[0]
    assert relative(whole, rows.double() @ weight.double().mT) < 1e-5
    for first, count in PARTS:
        part = slice(first, first + count)
        assert torch.equal(ops.product(rows[part][None], weight.mT[None])[0], whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 8])
def test_experts_of_real_sizes_on_a_gpu(rank: int) -> None:
    """By plain Triton for few tokens and by Gluon's kernels for many, where the GPU is a Hopper."""
    hidden, intermediate, experts, tokens, top_k = 2048, 768, 128, 2048, 8
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
        return (drawn / shape[-1] ** 0.5).bfloat16()

    weights = ExpertWeights(normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate))
    shapes = (rank, hidden), (intermediate, rank), (rank, hidden), (intermediate, rank), (rank, intermediate)
    names = "gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a"
    factors = {name: normal(experts, *shape) for name, shape in zip(names, shapes, strict=True)} if rank else {}
    lora = LoraFactors(**factors, down_lora_b=normal(experts, hidden, rank), scaling=2.0) if rank else None
    x = normal(tokens, hidden) * 40
    expert = torch.randint(experts, (tokens, top_k), generator=generator, device="cuda")
    weight = torch.rand(tokens, top_k, generator=generator, device="cuda")

    def run(part: slice) -> torch.Tensor:
        return amoeba.experts(x[part], Routing(expert[part], weight[part]), weights, lora=lora, backend="exact")

    whole = run(slice(tokens))
    for first, count in PARTS:
        assert torch.equal(run(slice(first, first + count)), whole[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [500, 1500])
def test_attention_of_real_sizes_on_a_gpu(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 128, generator=generator, device="cuda", dtype=torch.float32).bfloat16()
        for heads in (32, 4, 4)
    )
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril()[None, None]
    whole = ops.attention(q, k, v, seen, scale=0.1)
    for token in (0, 63, 64, tokens - 1):
        at, kept = slice(token, token + 1), slice(token + 1)
        one = ops.attention(q[:, :, at], k[:, :, kept], v[:, :, kept], seen[:, :, at, kept], scale=0.1)
        assert torch.equal(one, whole[:, :, at])
        room = [torch.nn.functional.pad(each[:, :, kept], (0, 0, 0, 700)) for each in (k, v)]
        seen_room = torch.nn.functional.pad(seen[:, :, at, kept], (0, 700))
        assert torch.equal(ops.attention(q[:, :, at], *room, seen_room, scale=0.1), one)
