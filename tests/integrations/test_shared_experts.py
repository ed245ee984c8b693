"""Shared experts that are computed while placed experts are under way on the CPU.

A CPU stands for the GPU: the order of the calls and the numbers are the same there.
"""

import copy
import threading

import pytest
import torch

from amoeba import place_experts
from amoeba.backends.packed import BACKEND
from amoeba.integrations import experts_module
from amoeba.integrations.experts_module import SHARED
from tiny_models import build, experts_of, token_ids

ROUTED_FIRST = ("deepseek_v3", "glm4_moe", "dots1")
SHARED_FIRST = ("qwen2_moe", "qwen3_next")


@pytest.fixture
def alongside(monkeypatch):
    """Has a CPU treated as a GPU is."""
    monkeypatch.setattr(experts_module, "runs_alongside", lambda x: not torch.compiler.is_compiling())


def placed(model_type):
    model = build(model_type).to(torch.bfloat16)
    place_experts(model, "cpu-bf16")
    return model


def blocks(model):
    return [module.__dict__[SHARED] for module in experts_of(model)]


def found(model):
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(input_ids=token_ids()).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same_bits(model, expected):
    for one, other in zip(found(model), expected, strict=True):
        assert torch.equal(one, other)


def needs(model_type):
    return pytest.param(model_type, marks=pytest.mark.skipif(not _has(model_type), reason="not in this transformers"))


def _has(model_type):
    import transformers

    return model_type in transformers.CONFIG_MAPPING


@pytest.mark.parametrize("model_type", [needs(name) for name in (*ROUTED_FIRST, *SHARED_FIRST)])
def test_the_bits_are_those_of_one_after_the_other(model_type, request):
    model = placed(model_type)
    expected = found(model)
    request.getfixturevalue("alongside")
    assert_same_bits(model, expected)
    assert_same_bits(model, expected)  # the first pass may have found out the order
    assert all(block._in_order == (model_type in ROUTED_FIRST) for block in blocks(model))


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_shared_experts_run_while_the_routed_ones_are_under_way(alongside, monkeypatch, step):
    model, own, reached = placed("deepseek_v3"), getattr(BACKEND.operator, step), threading.Event()

    def wait(*arguments):
        assert reached.wait(20), "the shared experts came after the routed ones"
        reached.clear()
        return own(*arguments)

    monkeypatch.setattr(BACKEND.operator, step, wait)
    for name, module in model.named_modules():
        if name.endswith("shared_experts.up_proj"):
            if step == "forward":
                module.register_forward_hook(lambda *_: reached.set())
            else:
                module.register_full_backward_hook(lambda *_: reached.set())
    found(model)


def test_a_copied_model_keeps_overlapping(alongside):
    model = placed("deepseek_v3")
    expected, copied = found(model), copy.deepcopy(model)
    assert_same_bits(copied, expected)
    shared = blocks(copied)
    assert all(block._in_order and block.overlap(torch.empty(1)) for block in shared)
    assert not {id(block._module) for block in shared} & {id(block._module) for block in blocks(model)}


def test_a_module_with_hooks_of_its_own_is_left_to_its_block(alongside):
    model, called = placed("deepseek_v3"), []
    expected = found(model)
    for block in blocks(model):
        block._module.register_forward_pre_hook(lambda *_: called.append(1))
    assert_same_bits(model, expected)
    assert len(called) == len(blocks(model))


def test_activation_checkpointing_recomputes_both(alongside):
    model = placed("deepseek_v3").train()
    expected = found(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_bits(model, expected)


def test_on_the_cpu_nothing_is_early(monkeypatch):
    model = placed("deepseek_v3")
    for block in blocks(model):
        monkeypatch.setattr(block, "compute", lambda x: pytest.fail("computed early"))
    found(model)


def test_a_compiled_block_calls_its_shared_experts_itself():
    block = placed("deepseek_v3").model.layers[0].mlp
    x = torch.randn(2, 9, block.experts.down_proj.shape[1], dtype=torch.bfloat16)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))
