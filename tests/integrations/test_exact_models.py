"""Exact mode: generation and training have the same log-probabilities, to the last bit.

B rows · N tokens of a text · V vocabulary
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import amoeba
from amoeba import lora
from amoeba.core.errors import BadValue
from amoeba.core.torch_internals import has_dispatch_mode
from amoeba.cpu.weights import Path as CpuPath
from amoeba.cpu.weights import current_path
from amoeba.decoding import Decoder
from amoeba.decoding.decoder import native_steps
from amoeba.integrations import exact_mode as integration
from amoeba.integrations.exact_mode import exact, is_exact, log_probabilities
from amoeba.integrations.place_experts import place_experts
from selection import each_value_once, quick
from tiny_models import VOCABULARY, build, experts_classes, relative

NEW = 3
FAMILIES = "qwen3_moe", "gpt_oss", "deepseek_v3"
NATIVE = "qwen3_moe", "gpt_oss"
_built: dict[tuple[str, torch.dtype], Any] = {}


def made(family: str, dtype: torch.dtype = torch.float32) -> Any:
    if (family, dtype) not in _built:
        model = build(family, max_position_embeddings=1024).to(dtype)
        model.set_experts_implementation("amoeba")
        model.generation_config.eos_token_id = None
        _built[family, dtype] = model
    return copy.deepcopy(_built[family, dtype])


def trained(model: Any) -> Any:
    """Norms, biases and sinks that are not all one or zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def needs_native(test: Any) -> Any:
    """In both dtypes, but in bf16 where its products are those of AMX tiles."""
    tiles = current_path() is CpuPath.AMX
    half = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(tiles, reason="exact products are AMX tiles"))
    return pytest.mark.parametrize("dtype", [torch.float32, half], ids=str)(test)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generated(
    model: Any, *lengths: int, capture: bool | None = None, native: bool = False
) -> tuple[list[list[int]], list[Tensor]]:
    """Texts, and the log-probabilities of their new tokens. native: the core computes the steps."""
    rows, length, steps = prompts(*lengths), max(lengths) + NEW, native_steps(model) if native else None
    assert not isinstance(steps, str), steps
    decoder = Decoder(model, batch=len(rows), length=length, capture=capture, native=steps, return_logprobs=True)
    steps = list(decoder.generate(rows, NEW))
    texts = [row + [tokens[place] for tokens in steps] for place, row in enumerate(rows)]
    return texts, list(decoder.logprobs(NEW))


def in_training(model: Any, texts: list[list[int]], side: str = "left") -> list[Tensor]:
    """The log-probabilities of their last tokens."""
    length = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        place = slice(length - len(text), None) if side == "left" else slice(len(text))
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    model.train()
    ids, mask = ids.to(model.device), mask.to(model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    model.eval()
    assert logits.requires_grad
    found = log_probabilities(logits[:, :-1], ids[:, 1:]).cpu()
    ends = [length if side == "left" else len(text) for text in texts]
    return [each[end - 1 - NEW : end - 1] for each, end in zip(found.detach(), ends, strict=True)]


def differences(model: Any, *lengths: int, capture: bool | None = None, native: bool = False) -> list[float]:
    """Of generation, from training on the same batch with padding on either side, and on each text alone."""
    texts, rollout = generated(model, *lengths, capture=capture, native=native)
    alone = [in_training(model, [text])[0] for text in texts]
    others = in_training(model, texts), in_training(model, texts, "right"), alone
    return [max(float((a - b).abs().max()) for a, b in zip(rollout, other, strict=True)) for other in others]


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_training_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = made(family, dtype)
    with amoeba.exact(model):
        assert differences(model, 65, 1, 17) == [0, 0, 0]


@needs_native
@each_value_once()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", NATIVE)
def test_steps_of_the_core_have_them_too(family: str, dtype: torch.dtype, threads: int) -> None:
    model, before = trained(made(family, dtype)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with amoeba.exact(model):
            assert differences(model, 65, 1, 17, native=True) == [0, 0, 0]
    finally:
        torch.set_num_threads(before)


def test_without_it_they_differ() -> None:
    assert max(differences(made("qwen3_moe"), 65, 1)) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(1,), (63,), (64,), (500,), (63, 64, 65, 500, 1, 2, 300, 7)], ids=str)
def test_so_they_have_at_every_length(family: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    model = made(family, dtype)
    with exact(model):
        assert differences(model, *lengths) == [0, 0, 0]


@needs_native
@pytest.mark.thorough
@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("lengths", [(1,), (63,), (64,), (500,), (63, 64, 65, 500, 1, 2, 300, 7)], ids=str)
def test_so_have_steps_of_the_core(family: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    model = trained(made(family, dtype))
    with exact(model):
        assert differences(model, *lengths, native=True) == [0, 0, 0]


def with_lora(model: Any, placement: str | None) -> Any:
    if placement is not None:
        place_experts(model, placement)
    lora.attach(model, 3, 5, ["experts", "q_proj"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


@quick(lambda placement: placement == "mxfp4-weights")
@pytest.mark.parametrize("placement", [None, "fp8-weights", "mxfp4-weights"])
def test_lora_and_quantised_experts(placement: str | None) -> None:
    model = with_lora(made("qwen3_moe", torch.bfloat16), placement)
    with exact(model):
        assert differences(model, 33, 5) == [0, 0, 0]


@needs_native
@quick(lambda family, placement: (family, placement) == ("gpt_oss", "mxfp4-weights"))
@pytest.mark.parametrize("placement", [None, "fp8-weights", "mxfp4-weights"])
@pytest.mark.parametrize("family", NATIVE)
def test_lora_and_quantised_experts_in_steps_of_the_core(
    family: str, placement: str | None, dtype: torch.dtype
) -> None:
    model = with_lora(trained(made(family, dtype)), placement)
    with exact(model):
        assert differences(model, 33, 5, native=True) == [0, 0, 0]


@needs_native
def test_factors_of_gate_and_up_that_are_apart_in_steps_of_the_core(dtype: torch.dtype) -> None:
    model = made("qwen3_moe", dtype)
    lora.attach(model, 5, 5, ["experts", "v_proj"], share_a=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    with exact(model):
        assert differences(model, 9, native=True) == [0, 0, 0]


def test_what_the_core_does_not_compute_exactly_keeps_the_loop() -> None:
    model = made("deepseek_v3")
    with exact(model):
        assert "latent attention" in native_steps(model)
    model = made("qwen3_moe")
    with exact(model):
        assert "exact mode" in native_steps(model, dense="int8")
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        assert "hooks watch" in native_steps(model)


def test_the_loop_of_transformers_too() -> None:
    model, (prompt,) = made("gpt_oss"), prompts(20)
    with exact(model):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = model(input_ids=out.sequences).logits[0, len(prompt) - 1 : -1]
    assert torch.equal(torch.cat(out.logits), logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_fp64(family: str) -> None:
    model, ids = made(family), torch.tensor([prompts(21)[0], prompts(22)[0][:21]])
    truth = made(family).double()
    truth.set_experts_implementation("eager")
    truth(input_ids=ids, labels=ids).loss.backward()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with exact(model):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, got), wanted in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert got.grad is not None, name
        assert relative(got.grad.double(), wanted.grad) < 1e-5, name


def test_layers_that_run_again_in_backward_are_exact() -> None:
    model, ids = made("qwen3_moe"), torch.tensor(prompts(40))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[Tensor] = []
    with exact(model):
        layer = model.model.layers[0].self_attn
        layer.register_forward_hook(lambda _, given, found: seen.append(found[0].detach().clone()))
        model(input_ids=ids).logits.sum().backward()
    assert not has_dispatch_mode()
    first, again = seen
    assert torch.equal(first, again)


def test_the_mask_of_texts_without_padding_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made_masks, own = [], integration.sdpa_mask

    def note(*args: Any, **kwargs: Any) -> Tensor:
        made_masks.append(own(*args, **kwargs))
        return made_masks[-1]

    monkeypatch.setattr(integration, "sdpa_mask", note)
    model, ids = made("qwen3_moe"), torch.randint(3, VOCABULARY, (1, 9))
    with exact(model):
        wanted = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        assert len(made_masks) == 1
        made_masks[0].fill_(True)  # by somebody else: it is made anew
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        padding = torch.tensor([[0] * 4 + [1] * 5])
        assert not torch.equal(model(input_ids=ids, attention_mask=padding, use_cache=False).logits, wanted)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        shorter = model(input_ids=ids[:, :5], use_cache=False).logits
    assert torch.equal(shorter, wanted[:, :5])
    assert not integration._masks


def test_undo_leaves_the_model_as_it_was() -> None:
    model, ids = made("qwen3_moe"), torch.tensor(prompts(9))
    before = model(input_ids=ids).logits
    mode = exact(model)
    assert is_exact(model)
    mode.undo()
    assert not is_exact(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_pass_that_fails_leaves_torch_as_it_was() -> None:
    model = made("qwen3_moe")
    with exact(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[VOCABULARY + 1]]))
        assert not has_dispatch_mode()


def test_what_cannot_be_exact_is_refused() -> None:
    model, ids = made("qwen3_moe"), torch.tensor(prompts(9))
    with exact(model):
        with pytest.raises(ValueError, match="not exact yet"):
            exact(model)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="got autocast"):
            model(input_ids=ids)
        model.model.layers[0].self_attn.attention_dropout = 0.5
        with pytest.raises(ValueError, match="no dropout"):
            model.train()(input_ids=ids)
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="experts_implementation"):
        exact(model)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        exact(made("qwen3_moe").double())
    with pytest.raises(ValueError, match="a model of transformers"):
        exact(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("placement", ["cpu-int8", "cpu-bf16"])
def test_placements_that_cannot_are_refused(placement: str) -> None:
    model = made("qwen3_moe")
    place_experts(model, placement)
    with pytest.raises(ValueError, match="got packed experts"):
        exact(model)
    assert not is_exact(model)


@pytest.mark.parametrize("family", ["qwen3_next", "minimax"])
def test_layers_that_are_not_attention_are_refused(family: str) -> None:
    model = build(family)
    model.set_experts_implementation("amoeba")
    with pytest.raises(ValueError, match="attention"):
        exact(model)


@pytest.mark.thorough
@pytest.mark.parametrize("family", sorted(experts_classes()))
def test_every_family_is_exact_or_refused(family: str) -> None:
    model = build(family)
    if getattr(model, "generation_config", None) is None:
        pytest.skip("it generates no text")
    model.set_experts_implementation("amoeba")
    model.generation_config.eos_token_id = None
    try:
        with exact(model):
            found = differences(model, 21, 5)
    except BadValue:
        return
    assert found == [0, 0, 0]
