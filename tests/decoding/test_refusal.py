"""Models and settings that a Decoder does not serve, each with the sentence that says why."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import GenerationConfig, Qwen3MoeForCausalLM

from amoeba import lora
from amoeba.backends.eager import EagerBackend
from amoeba.backends.registry import Explanation
from amoeba.cpu import placements as cpu_placements
from amoeba.decoding import why_not
from amoeba.decoding.decoder import why_not_chosen
from amoeba.integrations import coverage as host_waits
from amoeba.integrations.coverage import why_waits
from amoeba.integrations.place_experts import place_experts
from tiny_models import build

needs_engine = pytest.mark.skipif(cpu_placements._why_not() is not None, reason=str(cpu_placements._why_not()))


@pytest.fixture(scope="module")
def model():
    return build("qwen3_moe")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe"])
def test_these_are_served(family):
    model = build(family)
    if not model._can_compile_fullgraph:
        pytest.skip(f"transformers {transformers.__version__} does not promise it for {family}")
    assert why_not(model) is None


def test_a_class_of_somebody_else_is_not():
    class Own(Qwen3MoeForCausalLM):
        pass

    model = build("qwen3_moe")
    model.__class__ = Own  # transformers 5.8 refuses to make one
    assert "Own is not a class of transformers" in (why_not(model) or "")


@needs_engine
def test_experts_that_are_elsewhere_are_not():
    model = build("qwen3_moe")
    place_experts(model, "cpu-bf16", trains=False, device=torch.device("cpu"))
    assert why_not(model) == "its experts are computed on the CPU, and the host waits for their rows in every layer"
    lora.attach(model, 2, 4, ["experts"])
    assert "computed on the CPU" in (why_not(model) or "")


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_quantised_experts_are_served_with_factors_too(format):
    model = build("qwen3_moe")
    place_experts(model, f"{format}-weights", trains=False, device=torch.device("cpu"))
    assert why_not(model) is None and why_waits(model, trains=True) is None
    lora.attach(model, 2, 4, ["experts"])
    assert why_not(model) is None and why_waits(model, trains=True) is None


def test_experts_whose_rows_the_host_counts_are_not(model, monkeypatch):
    class OnAGpu(EagerBackend):
        def why_waits(self, request, trains):
            there = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cuda")))
            return super().why_waits(there, trains)  # type: ignore[arg-type]

    monkeypatch.setattr(host_waits, "explain", lambda request: Explanation(object.__new__(OnAGpu), {}))
    told = "its experts are computed one after another, and the host waits for the number of rows of each"
    assert why_not(model) == why_waits(model, trains=True) == told


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"typical_p": 0.5, "do_sample": True}, "asks for Typical, which"),
        ({"no_repeat_ngram_size": 3, "bad_words_ids": [[5]]}, "asks for NoBadWords, NoRepeatNGram, which"),
        ({"suppress_tokens": [3]}, "asks for SuppressTokens, which"),
        ({"stop_strings": ["end"]}, "its generation_config has stop_strings"),
        ({"min_new_tokens": 3}, "its generation_config has min_new_tokens"),
        ({"use_cache": False}, "its generation_config turns the cache off"),
    ],
)
def test_settings_that_are_not_computed(model, settings, words):
    assert words in (why_not_chosen(model, GenerationConfig(eos_token_id=2, pad_token_id=0, **settings)) or "")


def test_settings_that_are(model):
    usual = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1, min_p=0.1)
    assert why_not_chosen(model, usual) is None
    assert why_not_chosen(model, GenerationConfig()) is None
