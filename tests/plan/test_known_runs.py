"""Runs of whole models on an H200 (docs/benchmarks.md) and on one core of a Xeon (dev/log/plan.md), planned: peaks
never above the plan nor 8 % below, speeds within a quarter. The constants of the plan come from most of these runs, so
this holds them together; other runs test it."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from amoeba.jobs.train import fast_paths
from amoeba.plan import memory, speed
from amoeba.plan.machine import Machine, described_machine
from amoeba.plan.memory import Choice, Work, memory_of, total
from amoeba.plan.model import read_facts
from amoeba.plan.speed import speed_of
from amoeba.stream.attaching import Budgets
from benchmarks.models.problem import SIZES
from benchmarks.plan import MODELS

H200 = replace(described_machine("h200"), gpu_flops=800e12, gpu_bandwidth=4.28e12, link=55e9)
ITS_CPU = {"cpu_flops": 3.55e12, "cpu_fp32_flops": 1.4e12, "cpu_bandwidth": 74e9, "cores": 16}
H200 = replace(H200, **ITS_CPU)
RESIDENT = Choice("resident", "cuda", torch.bfloat16)


def facts_of(name, **other):
    size = SIZES[name]
    return read_facts(name, config=AutoConfig.for_model(size.model_type, **size.settings | other, dtype="bfloat16"))


def facts_of_plan(name, layers):
    """The models of `python -m benchmarks plan`."""
    if name == "plan_1b":
        return read_facts(
            name,
            config=AutoConfig.for_model("qwen3_moe", **MODELS["1b"].config | {"vocab_size": 300}, dtype="bfloat16"),
        )
    return facts_of(name, num_hidden_layers=layers, vocab_size=300)


@pytest.mark.parametrize(
    ("name", "purpose", "rows", "moments", "peak", "milliseconds"),
    [
        ("1b", "train", 32, 8, 26.2, 109),
        ("1b", "train", 32, 4, 21.4, 108),
        ("120m", "train", 32, 8, 16.9, 69.1),
        ("olmoe", "train", 16, 4, 71.3, 264),
        ("1b", "finetune", 16, 8, 9.3, 40.9),
    ],
)
def test_training_steps(name, purpose, rows, moments, peak, milliseconds):
    facts, work = facts_of(name), Work(purpose, context=1024, batch=rows, rank=16, moments=moments)
    planned = total(memory_of(facts, RESIDENT, work), "cuda") / 2**30
    assert 0.92 <= peak / planned <= 1
    assert 1e3 * speed_of(facts, RESIDENT, work, H200).step_seconds == pytest.approx(milliseconds, rel=0.25)


@pytest.mark.parametrize(("rows", "microseconds"), [(1, 555), (4, 864), (8, 1253), (64, 2375)])
def test_steps_of_six_layers(rows, microseconds):
    facts, work = facts_of("qwen3_30b", num_hidden_layers=6), Work("generate", context=512, batch=rows, prompt=128)
    assert 1e6 * rows / speed_of(facts, RESIDENT, work, H200).decode == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(2048, 4.68), (4096, 7.95)])
def test_prompts_of_six_layers(tokens, milliseconds):
    """Captured ones. Those of commands are not, which shows where they are short."""
    facts, work = facts_of("qwen3_30b", num_hidden_layers=6), Work("generate", tokens + 64, 1, prompt=tokens)
    assert 1e3 * tokens / speed_of(facts, RESIDENT, work, H200).prefill == pytest.approx(milliseconds, rel=0.25)


@pytest.mark.parametrize(
    ("code", "share", "microseconds"),
    [("bf16", 0.5, 187), ("bf16", 0.25, 299)],
)
def test_streamed_layers_take_at_least_what_their_misses_take(code, share, microseconds):
    """us a layer, of which 68 are not in that benchmark of bare layers: attention and what is between the layers."""
    from amoeba.plan.speed import _LINK, hit_rate

    slots = int(128 * share)
    missed = 8 * (1 - hit_rate(slots, 128, 8)) * 9.4372e6
    assert 21.6 + 1e6 * missed / (55e9 * _LINK) == pytest.approx(microseconds, rel=0.25)


def test_the_plan_knows_which_runs_are_worth_compiling():
    assert speed._WORTH_COMPILING == fast_paths.WORTH_COMPILING


@pytest.mark.parametrize(
    ("name", "layers", "rows", "peak", "milliseconds"),
    [("qwen3_30b", 4, 4, 6338, 16.6), ("qwen3_30b", 4, 16, 9801, 52), ("plan_1b", 12, 4, 4372, 27.8)],
)
def test_lora_steps_of_short_runs(name, layers, rows, peak, milliseconds):
    """Their layers are captured and not compiled."""
    facts = facts_of_plan(name, layers)
    work = Work("finetune", 1024, rows, rank=8)
    assert 0.92 <= peak / (total(memory_of(facts, RESIDENT, work), "cuda") / 2**20) <= 1
    assert 1e3 * speed_of(facts, RESIDENT, work, H200).step_seconds == pytest.approx(milliseconds, rel=0.25)


@pytest.mark.parametrize(
    ("name", "layers", "placement", "prompt", "step"),
    [
        ("qwen3_30b", 4, "resident", 367, 3282),
        ("qwen3_30b", 4, "fp8-weights", 329, 3506),
        ("qwen3_30b", 4, "mxfp4-weights", 364, 3460),
        ("qwen3_30b", 4, "cpu-bf16", 14.2, 84.2),
        ("plan_1b", 12, "resident", 305, 2473),
    ],
)
def test_prompts_and_steps_of_commands(name, layers, placement, prompt, step):
    """Thousands of tokens per second of a prompt of 1024, and new tokens behind it."""
    facts = facts_of_plan(name, layers)
    choice, work = replace(RESIDENT, placement=placement), Work("generate", 1088, 1, prompt=1024)
    found = speed_of(facts, choice, work, H200)
    assert (found.prefill / 1e3, found.decode) == (pytest.approx(prompt, rel=0.25), pytest.approx(step, rel=0.2))


@pytest.mark.parametrize(
    ("name", "layers", "share", "prompt"),
    [("qwen3_30b", 4, 0.5, 744), ("plan_1b", 12, 0.5, 910), ("qwen3_30b", 24, 0.27, 107)],
)
def test_first_prompts_through_streamed_experts(name, layers, share, prompt):
    """What is read from a disk of 4.05 GB/s."""
    facts, work = facts_of_plan(name, layers), Work("generate", 1088, 1, prompt=1024)
    found = speed_of(facts, with_slots(facts, share), work, replace(H200, disk=4.05e9))
    assert found.prefill == pytest.approx(prompt, rel=0.25)


def with_slots(facts, share):
    slots = [int(share * each.experts) for each in facts.entries]
    return replace(RESIDENT, placement="streamed", budgets=Budgets(0, 0, slots, [e.experts for e in facts.entries]))


@pytest.mark.parametrize(
    ("layers", "share", "hits", "step"),
    [(24, 0.27, 0.852, 159), (24, 0.56, 0.936, 273), (24, 0.86, 0.981, 474), (4, 0.5, 0.649, 445)],
)
def test_new_tokens_through_streamed_experts(layers, share, hits, step):
    facts = facts_of("qwen3_30b", num_hidden_layers=layers, vocab_size=300)
    work = Work("generate", 1088, 1, prompt=1024)
    assert speed_of(facts, with_slots(facts, share), work, H200, hits=hits).decode == pytest.approx(step, rel=0.15)


def test_a_lora_step_through_streamed_experts():
    facts = facts_of("qwen3_30b", num_hidden_layers=4, vocab_size=300)
    work, choice = Work("finetune", 1024, 4, rank=8), with_slots(facts, 0.5)
    assert 0.92 <= 4368 / (total(memory_of(facts, choice, work), "cuda") / 2**20) <= 1
    assert speed_of(facts, choice, work, H200).step_tokens_per_second == pytest.approx(37_200, rel=0.15)


@pytest.mark.parametrize(("placement", "milliseconds"), [("cpu-bf16", 69), ("cpu-int8", 54)])
def test_experts_of_a_lora_step_on_a_cpu_with_matrix_units(placement, milliseconds):
    """16 cores, 2048 tokens (docs/benchmarks_cpu.md): a layer's experts, without what is around them."""
    facts = facts_of("qwen3_30b", num_hidden_layers=8)
    work = Work("finetune", 2048, 1, rank=8)
    with_experts, without = (
        speed_of(facts, replace(RESIDENT, placement=each), work, H200).step_seconds for each in (placement, "resident")
    )
    assert 1e3 * (with_experts - without) / 8 == pytest.approx(milliseconds, rel=0.35)


# Cascade Lake, one core, CPU time: experts in float32, packed, or as codes; the other weights in float32.
_CORE = {"cpu_flops": 125e9, "cpu_bandwidth": 11.3e9, "disk": 1e9}
CORE = Machine("Xeon", "measured", ram_bytes=24 << 30, ram_free=24 << 30, cores=1, **_CORE)
MIDDLE = {
    "num_hidden_layers": 4, "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 300,
}  # fmt: skip
ON_A_CORE = {  # tokens/s of prompts of 26, 208 and 1300 tokens, then of new ones; LoRA steps of 256 and 1024
    "resident": ((257, 795, 874), (83.5, 79.6, 68.8), (318, 441)),
    "cpu-bf16": ((452, 913, 989), (131, 123, 107), (427, 537)),
    "cpu-int8": ((596, 1612, 1516), (178, 169, 133), (588, 777)),
    "fp8-weights": ((260, 603, 833), (132, 128, 81.8), (299, 427)),
    "mxfp4-weights": ((284, 511, 878), (207, 200, 141), (266, 364)),
}


@pytest.mark.parametrize("placement", ON_A_CORE)
def test_speeds_on_a_core(placement):
    facts = read_facts("middle", config=AutoConfig.for_model("qwen3_moe", **MIDDLE, dtype="bfloat16"))
    choice = Choice(placement, "cpu", torch.float32)
    prompts, steps, training = ON_A_CORE[placement]
    for tokens, prompt, step in zip((26, 208, 1300), prompts, steps, strict=True):
        found = speed_of(facts, choice, Work("generate", tokens + 24, 1, prompt=tokens), CORE)
        assert (found.prefill, found.decode) == (pytest.approx(prompt, rel=0.25), pytest.approx(step, rel=0.3))
    for rows, length, measured in ((2, 128, training[0]), (4, 256, training[1])):
        found = speed_of(facts, choice, Work("finetune", length, rows, rank=8), CORE)
        assert found.step_tokens_per_second == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("placement", "prompt", "step", "training"), [("resident", 141, 14.6, 38.6), ("cpu-int8", 370, 39.1, 77)]
)
def test_speeds_on_a_core_of_a_model_that_set_no_constant(placement, prompt, step, training):
    sizes = MIDDLE | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 12}
    facts = read_facts("1b", config=AutoConfig.for_model("qwen3_moe", **sizes, dtype="bfloat16"))
    choice = Choice(placement, "cpu", torch.float32)
    found = speed_of(facts, choice, Work("generate", 200, 1, prompt=176), CORE)
    assert (found.prefill, found.decode) == (pytest.approx(prompt, rel=0.25), pytest.approx(step, rel=0.25))
    found = speed_of(facts, choice, Work("finetune", 58, 2, rank=8), CORE)
    assert found.step_tokens_per_second == pytest.approx(training, rel=0.3)


ALL, MANY, FEW = (32,) * 4, (18, 18, 18, 17), (10, 9, 9, 9)  # slots of each layer


@pytest.mark.parametrize(
    ("tokens", "slots", "seconds"),
    [
        *((26, ALL, 0.081), (208, ALL, 0.419), (650, ALL, 0.88)),
        *((26, MANY, 0.171), (208, MANY, 0.61), (650, MANY, 1.076)),
        *((26, FEW, 0.226), (208, FEW, 0.695), (650, FEW, 1.155)),
    ],
)
def test_later_prompts_through_streamed_experts_on_a_core(tokens, slots, seconds):
    """CPU time of a prompt that finds in the slots what another has left there."""
    facts = read_facts("middle", config=AutoConfig.for_model("qwen3_moe", **MIDDLE, dtype="bfloat16"))
    choice, machine = Choice("streamed", "cpu", torch.float32, slots=slots), replace(CORE, disk=10e9)
    found = speed_of(facts, choice, Work("serve", tokens + 24, 1, prompt=tokens), machine)
    assert tokens / found.prefill == pytest.approx(seconds, rel=0.25)


def test_first_prompt_and_steps_through_streamed_experts_on_a_core():
    facts = read_facts("middle", config=AutoConfig.for_model("qwen3_moe", **MIDDLE, dtype="bfloat16"))
    choice = Choice("streamed", "cpu", torch.float32, slots=(15, 15, 14, 14))
    work, machine = Work("generate", 272, 1, prompt=208), replace(CORE, disk=10e9)
    found = speed_of(facts, choice, work, machine, hits=0.464)
    assert (found.prefill, found.decode) == (pytest.approx(283, rel=0.25), pytest.approx(37.9, rel=0.25))
    assert speed_of(facts, choice, work, replace(machine, disk=1e8)).prefill < 60, "what a slow disk leaves"


def test_codes_of_four_bits_are_multiplied_as_they_are_where_the_cpu_can():
    facts = read_facts("middle", config=AutoConfig.for_model("qwen3_moe", **MIDDLE, dtype="bfloat16"))
    choice, work = Choice("mxfp4-weights", "cpu", torch.float32), Work("generate", 272, 1, prompt=208)
    found = speed_of(facts, choice, work, replace(CORE, whole_numbers=True))
    assert found.prefill == pytest.approx(1251, rel=0.25)


@pytest.mark.parametrize(
    ("placement", "few", "many"),
    [
        ("resident", 1542, 1816),
        ("streamed", 921, 1098),
        ("mxfp4-weights", 938, 1119),
        ("fp8-weights", 1016, 1208),
        ("cpu-bf16", 1651, 1853),
        ("cpu-int8", 1280, 1503),
    ],
)
def test_peaks_of_lora_steps_on_an_x86_core(placement, few, many, monkeypatch):
    """MiB, with rows of 2 x 128 and of 4 x 256 tokens that are full."""
    monkeypatch.setattr(memory, "_X86_PRODUCTS", 64 << 20)
    facts = read_facts("middle", config=AutoConfig.for_model("qwen3_moe", **MIDDLE, dtype="bfloat16"))
    facts = replace(facts, scratch_bytes=6 << 20)  # two experts with the blocks around them
    slots = (15, 15, 14, 14) if placement == "streamed" else ()
    for rows, length, measured in ((2, 128, few), (4, 256, many)):
        lines = memory_of(
            facts, Choice(placement, "cpu", torch.float32, slots=slots), Work("finetune", length, rows, rank=8)
        )
        assert 0.91 <= measured / (total(lines, "cpu") / 2**20) <= 1
