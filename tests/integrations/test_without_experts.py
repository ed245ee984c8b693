"""Models made without memory for their experts: those that the same thread makes meanwhile, and no others."""

from concurrent.futures import ThreadPoolExecutor

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from amoeba.integrations.experts_module import experts_left_out
from tiny_models import experts_of, tiny_config


def numbers_of_experts() -> int:
    model = Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, "qwen3_moe"))
    return sum(parameter.numel() for module in experts_of(model) for parameter in module.parameters())


def test_only_what_this_thread_makes_meanwhile_has_none() -> None:
    whole = numbers_of_experts()
    with ThreadPoolExecutor(1) as beside, experts_left_out():
        assert numbers_of_experts() == 0
        assert beside.submit(numbers_of_experts).result() == whole > 0
    assert numbers_of_experts() == whole
