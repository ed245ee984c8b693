"""Steps of the C++ core against transformers' loop: the same tokens in fp32, the same numbers in other formats."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from test_decoder import attach_random
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from amoeba import lora
from amoeba.cpu.weights import PackedWeights
from amoeba.decoding import cpu_step
from amoeba.decoding.cpu_step import NativeModel, native_model
from amoeba.decoding.decoder import Decoder, native_steps
from amoeba.decoding.engine import Engine, Request
from amoeba.integrations.experts_module import experts_modules, hand_over, weights_of
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.generate.token_steps import choose_steps
from amoeba.lora.attaching import STATE, attached_to, put_on, take_off
from amoeba.stream.cpu.memory import ExpertMemory
from amoeba.stream.placement import STREAMED, stream_from_memory
from amoeba.stream.store import StoreError
from greedy_texts import decoded, endless, plain, prompts
from model_kinds import build_kind
from selection import each_value_once, quick
from tiny_models import needs

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "gpt_oss"]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def native_of(model) -> NativeModel:
    native = native_steps(model)
    assert isinstance(native, NativeModel), native
    return native


def natively(model, rows, tokens=21, **options):
    length = max(map(len, rows)) + tokens
    return decoded(
        model, rows, tokens, Decoder(model, batch=len(rows), length=length, native=native_of(model)), **options
    )


@each_value_once()
@pytest.mark.parametrize("lengths", [(1,), (19, 3, 7)], ids=["one_token", "a_batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_plain_generate(family, lengths):
    """Past the window of 16, where there is one."""
    model, rows = endless(family), prompts(*lengths)
    expected = plain(model, rows)
    assert natively(model, rows) == expected
    assert len({token for row in expected for token in row}) > 2


def test_layers_without_experts_and_heads_that_are_not_normed():
    model = endless("qwen2_moe", mlp_only_layers=[0])
    assert natively(model, prompts(5)) == plain(model, prompts(5))


@each_value_once()
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "placement", ["cpu-bf16", "cpu-int8", "mxfp4-weights", "nvfp4-weights", "mxfp8-weights", "fp8-weights"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_of_experts_is_read(family, placement, dtype):
    """`native_model` compares each layer and the logits."""
    model = endless(family).to(dtype)
    place_experts(model, placement)
    native_of(model)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_weights_that_are_not_experts_are_read_in_int8_where_that_is_asked_for(family):
    model = endless(family)
    native = native_steps(model, "int8")
    assert isinstance(native, NativeModel), native
    assert native is not native_of(model)


def test_logits_have_the_same_bits_for_any_number_of_threads(threads):
    model = endless("qwen3_moe", hidden_size=200, moe_intermediate_size=72, num_key_value_heads=1)
    place_experts(model, "cpu-int8")
    native, generator = native_of(model), torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 1, 40, native.head_size, generator=generator) for _ in range(2))
    found = []
    for count in (1, 2, 3, 5):
        threads(count)
        logits_BV = torch.empty(2, native.vocabulary)
        native.stepper([*keys.clone()], [*values.clone()]).run(
            torch.tensor([[29], [17]]),
            torch.tensor([0, 12]),
            slot=29,
            token_B1=torch.tensor([[5], [9]]),
            logits_BV=logits_BV,
        )
        found.append(logits_BV)
    assert all(torch.equal(logits, found[0]) for logits in found) and found[0].isfinite().all()


def streamed(model, slots: int) -> list[ExpertMemory]:
    found = []
    for module in experts_modules(model).values():
        weights = stream_from_memory(weights_of(module), slots)
        hand_over(module, weights, STREAMED)
        found.append(weights.memory)
    return found


def logits_of(native, tokens=6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, native.key_heads, 40, size) for size in native.cache_sizes]
    stepper = native.stepper(*([torch.zeros(shape, dtype=native.dtype) for _ in native.layers] for shape in shapes))
    found = []
    for slot in range(tokens):
        token_B1 = torch.randint(native.vocabulary, (2, 1), generator=generator)
        found.append(torch.empty(2, native.vocabulary))
        position_B1 = torch.full((2, 1), slot)
        stepper.run(position_B1, torch.zeros(2, dtype=torch.int64), slot=slot, token_B1=token_B1, logits_BV=found[-1])
    return found


@each_value_once()
@pytest.mark.parametrize("slots", [2, 4, 8])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_streamed_experts_give_the_tokens_of_plain_generate(family, slots):
    """Two rows ask for up to six experts of a layer: more than there are slots, or fewer."""
    model, rows = endless(family, **eight_experts(family)), prompts(9, 4)
    expected = plain(model, rows)
    memories = streamed(model, slots)
    assert natively(model, rows) == expected
    assert all(memory.cache.counters.hits < memory.cache.counters.requested for memory in memories)


def eight_experts(family: str) -> dict[str, int]:
    return {"num_local_experts" if family in ("gpt_oss", "mixtral") else "num_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_streamed_experts_in_bf16_are_known_in_a_model_in_fp32(family):
    """As on a CPU without bf16 instructions, whose experts come from a bf16 checkpoint: its prompts round rows."""
    model = endless(family)
    for module in experts_modules(model).values():
        weights = stream_from_memory(weights_of(module).to(torch.bfloat16), slots=2)
        hand_over(module, weights, STREAMED)
    assert native_of(model).dtype == torch.float32


@each_value_once()
@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("placement", [None, "mxfp4-weights", "nvfp4-weights", "fp8-weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_experts_have_the_bits_of_resident_ones(family, slots, placement, dtype):
    """In every format, with adapters, whose factors are not in slots."""
    model = endless(family, **eight_experts(family)).to(dtype)
    if placement is not None:
        place_experts(model, placement)
    native_of(model)
    streamed_model = copy.deepcopy(model)
    streamed(streamed_model, slots)
    for each in (model, streamed_model):
        attach_random(each, ["experts", "q_proj"])
    expected, found = logits_of(native_of(model)), logits_of(native_of(streamed_model))
    assert all(map(torch.equal, found, expected)) and expected[-1].isfinite().all()


def test_streamed_experts_give_the_same_bits_for_any_number_of_threads(threads):
    found = []
    for count in (1, 2, 3, 5):
        threads(count)
        model = endless("qwen2_moe", **eight_experts("qwen2_moe"))
        streamed(model, 2)
        found.append(logits_of(native_of(model)))
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


def test_a_step_that_misses_nothing_is_one_call_and_is_counted(monkeypatch):
    model = endless("qwen3_moe", **eight_experts("qwen3_moe"))
    memories = streamed(model, 8)
    native = native_of(model)
    logits_of(native, 12)
    before = [replace(memory.cache.counters) for memory in memories]
    uses = [memory.cache.top(0).policy.now[0] for memory in memories]
    monkeypatch.setattr(ExpertMemory, "acquire", lambda *_: pytest.fail("experts were asked for"))
    expected = logits_of(native, 12)
    for memory, old, used in zip(memories, before, uses, strict=True):
        now = memory.cache.counters
        assert now.tokens - old.tokens == 24 and memory.cache.top(0).policy.now[0] - used == 12
        assert now.hits - old.hits == now.requested - old.requested > 3 * 12
    monkeypatch.undo()
    for memory in memories:
        memory.close()
    with pytest.raises(ValueError, match="a closed one"):
        logits_of(native)
    assert expected[-1].isfinite().all()


def test_an_expert_that_cannot_be_read_ends_the_step_and_nothing_else(monkeypatch):
    model = endless("qwen3_moe", **eight_experts("qwen3_moe"))
    memories = streamed(model, 2)
    native = native_of(model)
    expected, broken = logits_of(native), memories[1].store

    def fail(*_):
        raise StoreError("expert", "a disk", "no disk", "plug it in")

    monkeypatch.setattr(broken, "_read", fail)
    with pytest.raises(StoreError, match="no disk"):
        logits_of(native)
    monkeypatch.undo()
    assert all(map(torch.equal, logits_of(native), expected))


def test_slots_of_another_memory_are_noticed():
    model = endless("qwen3_moe", **eight_experts("qwen3_moe"))
    module = next(iter(experts_modules(model).values()))
    resident = weights_of(module)
    other = replace(resident, down_EHI=-resident.down_EHI.detach())
    streamed(model, 2)
    first = logits_of(native_of(model))
    hand_over(module, stream_from_memory(other, 2), STREAMED)
    assert not torch.equal(logits_of(native_of(model))[0], first[0])


def test_the_beginning_of_a_conversation_is_read_once(monkeypatch):
    model, begin = endless("qwen3_moe"), prompts(11)[0]
    decoder = Decoder(model, batch=1, length=80, native=native_of(model))
    said = decoded(model, [begin], 6, decoder)[0]
    read = []
    handle = model.register_forward_pre_hook(
        lambda _, args, more: read.append(more["input_ids"].shape[1]), with_kwargs=True
    )
    follow = [*begin, *said, *prompts(3)[0]]
    try:
        again = decoded(model, [follow], 6, decoder)
    finally:
        handle.remove()
    assert read == [4] and again == plain(model, [follow], 6)  # the last token that was said was never an input
    assert decoded(model, [begin[:5]], 6, decoder) == plain(model, [begin[:5]], 6)


def test_what_is_not_recognised_says_why():
    model = endless("mixtral")
    model.model.layers[1].extra = nn.Parameter(torch.zeros(3))
    assert "unknown kind (model.layers.1.extra)" in native_model(model)
    assert "float64" in native_model(endless("mixtral").double())
    model = endless("mixtral")
    model.register_forward_hook(lambda *_: None)  # as amoeba.replay's, which records what routers choose
    assert "hooks watch" in native_model(model)


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm"])
def test_a_layer_that_computes_something_else_is_refused(part):
    model = endless("qwen3_moe")
    module = getattr(model.model.layers[1], part)
    own = module.forward
    module.forward = lambda *args, **more: _scaled(own(*args, **more))
    assert "its layer 1 computes something else" in native_model(model)


def _scaled(out):
    return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01


def test_changed_parameters_and_adapters_are_noticed():
    model, rows = endless("qwen3_moe"), prompts(6)
    before = natively(model, rows)
    assert native_model(model) is native_model(model)
    with torch.no_grad():
        for module in experts_modules(model).values():
            module.down_proj.mul_(-3)
    assert natively(model, rows) == plain(model, rows) != before
    attach_random(model, ["experts"])
    adapted = natively(model, rows)
    assert adapted == plain(model, rows) != before
    with torch.no_grad():
        for module in experts_modules(model).values():
            module.lora_factors.down_lora_b.mul_(-1)
    assert natively(model, rows) == plain(model, rows) != adapted


def test_what_a_fused_optimizer_changed_is_noticed():
    model = endless("qwen3_moe")
    attach_random(model, ["experts"])
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = native_model(model)
    for factor in factors:
        factor.grad = torch.ones_like(factor)
    torch.optim.AdamW(factors, lr=0.1, fused=True).step()
    assert native_model(model) is not before


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen2_moe", "all-linear"), ("gpt_oss", ["gate", "down_proj", "k_proj"])]
)
def test_adapters_take_part(family, targets):
    """Also on a layer without experts, on shared experts and their gate, and where gate and up alternate."""
    model, rows = endless(family, **({"mlp_only_layers": [0]} if family == "qwen2_moe" else {})), prompts(9, 4)
    before = natively(model, rows, 8)
    attach_random(model, targets)
    assert natively(model, rows, 8) == plain(model, rows, 8) != before


@pytest.mark.parametrize("placement", ["cpu-int8", "mxfp4-weights"])
def test_adapters_of_experts_in_other_formats(placement):
    """`native_model` compares each layer and the logits."""
    model = endless("qwen3_moe").bfloat16()
    place_experts(model, placement)
    attach_random(model, ["experts", "q_proj"])
    native_of(model)


def test_adapters_that_are_switched_off_or_merged_are_noticed():
    model, rows = endless("qwen3_moe"), prompts(6)
    attach_random(model, ["experts", "q_proj", "v_proj"])
    adapted = natively(model, rows, 9)
    linears = attached_to(model).linears.values()
    for layer in linears:
        layer.enable_adapters(False)
    assert natively(model, rows, 9) == plain(model, rows, 9) != adapted
    for layer in linears:
        layer.enable_adapters(True)
        layer.merge()
    assert natively(model, rows, 9) == adapted
    for layer in linears:
        layer.unmerge()
    lora.merge(model)
    assert natively(model, rows, 9) == adapted


def test_adapters_in_lanes_share_what_is_packed(monkeypatch):
    model, ids, expected = endless("qwen3_moe"), prompts(6)[0], {}
    native_steps(model, "int8")
    monkeypatch.setattr(PackedWeights, "pack", lambda *_: pytest.fail("packed again"))
    kept = {}
    for name, sign in {"one": 1, "two": -1}.items():
        attach_random(model, ["experts", "q_proj"])
        with torch.no_grad():
            for factor in attached_to(model).experts["model.layers.1.mlp.experts"].parameters():
                factor.mul_(sign).add_(0.1)
        native = native_steps(model, "int8")
        expected[name] = decoded(model, [ids], 9, Decoder(model, batch=1, length=32, native=native))[0]
        kept[name] = take_off(model)

    def choose(name):
        if STATE in model.__dict__:
            take_off(model)
        put_on(model, kept[name])

    lanes = {name: functools.partial(choose, name) for name in kept}
    engine = Engine(model, slots=2, length=32, lanes=lanes, dense="int8")
    assert engine.kind == "native"
    heard = {name: [] for name in lanes}
    for name in lanes:
        engine.submit(Request(ids, 9, heard[name].append, lane=name))
    engine.finish_all()
    assert {name: [token.id for token in heard[name][:-1]] for name in lanes} == expected
    assert expected["one"] != expected["two"]


def test_generation_on_a_cpu_uses_it(monkeypatch):
    model = endless("qwen3_moe")
    steps = choose_steps(model, {}, batch=1, prompt_tokens=3, new_tokens=5)
    assert steps.kind == "native" and isinstance(steps.decoder, Decoder)
    monkeypatch.setattr(cpu_step, "_TOLERANCES", {torch.float32: 0.0})
    steps = choose_steps(endless("qwen3_moe"), {}, batch=1, prompt_tokens=3, new_tokens=5)
    assert (steps.kind, steps.decoder) == ("plain", None) and "something else" in steps.reason


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "glm4_moe", "granitemoeshared", "hy_v3", "minimax_m2"])
def test_biases_of_choices_pairs_of_rotated_numbers_and_multipliers(kind):
    model = build_kind(kind)
    model.set_experts_implementation("amoeba")
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) / 10)
    rows = prompts(9, 4)
    assert natively(model, rows, 12) == plain(model, rows, 12)


LATENT = [
    ("deepseek_v2", {}),
    (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
        },
    ),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "num_attention_heads": 6}),
    ("glm4_moe_lite", {}),
]
caches_latents = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"), reason="this transformers caches what is computed of the latents"
)


def of_kind(kind: str, **changes):
    model = build_kind(needs(kind), **changes)
    model.set_experts_implementation("amoeba")
    model.generation_config.eos_token_id = None
    return model


@caches_latents
@each_value_once()
@pytest.mark.parametrize("lengths", [(1,), (19, 3, 7)], ids=["one_token", "a_batch"])
@pytest.mark.parametrize(("kind", "changes"), LATENT)
def test_latent_attention_gives_the_tokens_of_plain_generate(kind, changes, lengths):
    model, rows = of_kind(kind, **changes), prompts(*lengths)
    assert natively(model, rows) == plain(model, rows)


@caches_latents
@quick(lambda q_lora_rank: q_lora_rank is not None)
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_adapters_of_latent_attention_take_part(q_lora_rank):
    model, rows = of_kind("deepseek_v3", q_lora_rank=q_lora_rank), prompts(9, 4)
    before = natively(model, rows, 8)
    attach_random(model, "all-linear")
    adapted = natively(model, rows, 8)
    assert adapted == plain(model, rows, 8) != before
    for layer in attached_to(model).linears.values():
        layer.merge()
    assert natively(model, rows, 8) == adapted


@caches_latents
@each_value_once()
@pytest.mark.parametrize("kind", ["deepseek_v2", "glm4_moe_lite"])
@pytest.mark.parametrize("placement", [None, "cpu-int8", "mxfp4-weights", "streamed"])
@pytest.mark.parametrize("dense", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_in_other_formats_and_for_any_number_of_threads(kind, placement, dense, dtype, threads):
    """`native_steps` compares each layer and the logits."""
    model, found = of_kind(kind).to(dtype), []
    if placement == "streamed":
        streamed(model, 2)
    elif placement is not None:
        place_experts(model, placement)
    native = native_steps(model, dense)
    assert isinstance(native, NativeModel), native
    for count in (1, 2, 3, 5):
        threads(count)
        found.append(logits_of(native))
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


@caches_latents
@pytest.mark.parametrize("slots", [None, 2])
def test_texts_of_different_lengths_share_a_step(slots):
    """As in `serve`: of latent attention, and with streamed experts."""
    model, rows = of_kind("deepseek_v3"), prompts(11, 3, 6)
    expected = plain(model, rows, 9)
    if slots is not None:
        streamed(model, slots)
    engine = Engine(model, slots=3, length=32)
    heard = [[] for _ in rows]
    for ids, tokens in zip(rows, heard, strict=True):
        engine.submit(Request(ids, 9, tokens.append))
    engine.finish_all()
    assert engine.kind == "native" and [[token.id for token in tokens[:-1]] for tokens in heard] == expected


@caches_latents
def test_queries_that_are_scaled_by_their_position_are_refused():
    assert "scaled by their position" in native_model(build_kind(needs("mistral4")))


def test_each_layer_has_its_own_rotary_embedding():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    model = of_kind("mellum", layer_types=kinds, rope_parameters=rope, sliding_window=16)
    rows = prompts(19, 3, 7)
    assert natively(model, rows) == plain(model, rows)
