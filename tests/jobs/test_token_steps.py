"""Which steps `amoeba generate` takes, what it says of them, and that the text does not depend on them."""

import pytest
import torch
from transformers import GenerationConfig

from amoeba.decoding import compiled_layers
from amoeba.decoding import decoder as decoders
from amoeba.jobs.generate import token_steps
from amoeba.jobs.generate.token_steps import choose_steps
from tiny_models import build

GREEDY = {"do_sample": False, "repetition_penalty": 1.0}


@pytest.fixture
def model(by_decoder):
    model = build("qwen3_moe")
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


@pytest.fixture
def prepared(monkeypatch) -> list[bool]:
    """Whether each decoder that was prepared was to be compiled."""
    calls: list[bool] = []
    monkeypatch.setattr(decoders.Decoder, "prepare", lambda self, tokens: calls.append(self._step.compiled))
    return calls


def choose(model, **changes):
    return choose_steps(model, GREEDY, **{"batch": 1, "prompt_tokens": 5, "new_tokens": 20, **changes})


def test_on_the_cpu_they_are_native_or_plain_with_the_reason():
    steps = choose(build("qwen3_moe"))
    assert steps.kind == "native" and isinstance(steps.decoder, decoders.Decoder)
    steps = choose(build("qwen3_moe").double())
    assert (steps.kind, steps.decoder) == ("plain", None)
    assert "float64" in steps.reason


def test_few_steps_are_captured_and_not_compiled(model, prepared):
    steps = choose(model)
    assert (steps.kind, prepared) == ("captured", [False])
    assert steps.reason == "not compiled: that pays from 20000 steps on, and there are 20 at most"
    assert steps.decoder is not None


def test_many_steps_are_compiled_and_fewer_where_the_code_is_there(model, prepared, monkeypatch):
    monkeypatch.setattr(token_steps, "STEPS_WORTH_COMPILING", 300)
    monkeypatch.setattr(token_steps, "STEPS_WORTH_LOADING", 30)
    assert choose(model, new_tokens=299).kind == "captured"
    assert choose(model, new_tokens=300).kind == "compiled"
    assert choose(model, new_tokens=30).reason == "30 steps are worth loading compiled code"
    assert choose(model, new_tokens=29).kind == "captured"
    assert choose(model, new_tokens=30, batch=2).kind == "captured"  # no code for two rows
    assert prepared == [False, True, True, False, False]


def test_code_of_another_model_is_not_taken_for_this_ones(model):
    compiled_layers.note(model, 1, 512)
    assert compiled_layers.is_there(model, 1, 512)
    assert not compiled_layers.is_there(model, 1, 1024)
    assert not compiled_layers.is_there(build("qwen3_moe", num_experts_per_tok=1), 1, 512)
    assert not compiled_layers.is_there(model.double(), 1, 512)


def test_what_is_asked_for_is_done(model, prepared):
    assert (choose(model, compile=True).kind, choose(model, compile=False).kind) == ("compiled", "captured")
    assert choose(model, compile=False).reason == "not compiled: as requested"
    assert prepared == [True, False, False]


def failing(monkeypatch, *, compiled: bool, captured: bool, error: Exception) -> None:
    def prepare(self, tokens):
        if captured if not self._step.compiled else compiled:
            raise error

    monkeypatch.setattr(decoders.Decoder, "prepare", prepare)


def test_where_compiling_fails_steps_are_captured(model, monkeypatch, our_log):
    failing(monkeypatch, compiled=True, captured=False, error=RuntimeError("no\n such  kernel."))
    steps = choose(model, compile=True)
    assert steps.kind == "captured"
    assert steps.reason == "compiling a step failed (RuntimeError: no such kernel)"
    assert f"{steps.reason}; continuing without it" in our_log.text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "RuntimeError: operation not permitted"),
        (torch.OutOfMemoryError("CUDA out of memory"), "there was not enough memory: CUDA out of memory"),
    ],
)
def test_where_capturing_fails_they_are_plain_and_somebody_is_told(model, monkeypatch, our_log, error, words):
    failing(monkeypatch, compiled=True, captured=True, error=error)
    steps = choose(model, compile=True)
    assert (steps.kind, steps.decoder) == ("plain", None)
    assert steps.reason.startswith(f"capturing a step failed ({words}")
    assert steps.reason in our_log.text
    assert "compiling a step failed" in our_log.text


def test_ctrl_c_while_preparing_is_no_failure(model, monkeypatch):
    def interrupted(self, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoders.Decoder, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(model)
