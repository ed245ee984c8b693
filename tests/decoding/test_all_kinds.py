"""Every kind of model: steps of fixed shape on fixed memory, replayed without Python, against transformers' own loop.

What a CUDA graph replays is recorded here without a GPU (`replayed_steps`): the operators of one step and no Python.
"""

import inspect

import pytest
from transformers import cache_utils

from amoeba.core.graph_replays import CannotCapture
from amoeba.decoding import Decoder, why_not
from amoeba.decoding.cache import FixedCache
from amoeba.decoding.step import Step
from amoeba.decoding.trial import first_wrong, host_decision
from greedy_texts import plain, prompts
from model_kinds import build_kind, kinds
from replayed_steps import replayed
from selection import quick
from tiny_models import needs

IS_OLD = "number_of_states" not in inspect.signature(cache_utils.LinearAttentionLayer.__init__).parameters
needs_states = pytest.mark.skipif(IS_OLD, reason="in this transformers the host decides about states of MiniMax")
TOKENS = 20  # past the window of 16 of the layers that have one
# Kinds that cannot be captured, and what is said of them.
REFUSED = {
    "deepseek_v4": "transformers makes no static cache for it",
    "glm5_next": "index in modeling_glm5_next.py",
    "qwen4_exp": "nonzero in modeling_qwen4_exp.py",
    "unlimited_ocr": "its cache has other kinds of layers (UnlimitedOcrStaticReferenceSlidingWindowLayer)",
}
# One for each way to keep a state: linear attention, Mamba, convolutions, an indexer, both in one layer, a cache class
# of its own; and one whose attention has a position bias.
EVERY_TIME = {"qwen3_next", "granitemoehybrid", "lfm2_moe", "deepseek_v32", "zaya", "minimax", "inkling", *REFUSED}
EVERY_TIME -= {"glm5_next", "unlimited_ocr"}  # 15 s and 4


@quick(lambda kind: kind in EVERY_TIME)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kinds())
def test_a_replayed_step_gives_the_tokens_of_plain_generate(kind, monkeypatch):
    """Of texts of different lengths, padded; and what cannot be replayed is refused, with the reason."""
    if IS_OLD and kind in ("minimax", "deepseek_v4"):
        pytest.skip("in this transformers the host decides about its states")
    model = build_kind(kind)
    model.set_experts_implementation("batched_mm")  # torch alone: the host counts no rows
    if kind in REFUSED:
        assert REFUSED[kind] in (why_not(model) or refusal(model))
        return
    assert why_not(model) is None
    rows = prompts(17, 3, 7)
    decoder = Decoder(model, batch=3, length=40)
    recorded = replayed(decoder._step)
    assert [list(row) for row in zip(*decoder.generate(rows, TOKENS), strict=True)] == plain(model, rows, TOKENS)
    assert not recorded.decisions
    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: not self.cache.states)
    again = prompts(5, 9, 1)  # of the same recorded step: nothing of the texts before is left
    assert [list(row) for row in zip(*decoder.generate(again, 4), strict=True)] == plain(model, again, 4)


def refusal(model) -> str:
    return host_decision(Decoder(model, length=40).plain_step(prompts(9)[0])) or ""


@needs_states
@pytest.mark.filterwarnings("ignore")
def test_a_state_that_is_replaced_and_not_written_to_shows_in_the_tokens():
    """What the replay is for: such a model would pass if its Python ran again."""
    model = build_kind(needs("qwen3_next"))
    model.set_experts_implementation("batched_mm")
    rows = prompts(9)
    decoder = Decoder(model, length=40)
    layer = decoder.cache.states[0]

    def replace(states, state_idx=0, **_):
        layer.recurrent_states[state_idx] = states.clone()
        return layer.recurrent_states[state_idx]

    layer.update_recurrent_state = replace
    replayed(decoder._step)
    tokens = [token for (token,) in decoder.generate(rows, TOKENS)]
    expected = plain(model, rows, TOKENS)[0]
    assert tokens != expected
    assert first_wrong(model, rows[0], expected) is None
    assert first_wrong(model, rows[0], tokens) is not None


@needs_states
@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_promise_is_tried_before_its_steps_are_captured(monkeypatch):
    """As on a GPU, up to the graph itself."""
    monkeypatch.setattr(Step, "prepare", lambda self, capture: None)
    model = build_kind(needs("minimax"))
    model.set_experts_implementation("batched_mm")
    Decoder(model, length=40, capture=True).prepare(5)
    own = model.model.layers[0].forward
    monkeypatch.setattr(model.model.layers[0], "forward", lambda x, **more: own(x, **more) * (1 + x[0, 0, 0].item()))
    with pytest.raises(CannotCapture, match="the host waits for numbers of the device inside a step: _local_scalar"):
        Decoder(model, length=40, capture=True).prepare(5)
    monkeypatch.setattr(model.model.layers[0], "forward", own)
    monkeypatch.setattr(FixedCache, "begin", lambda self: self.slot.zero_())  # states of the text before are left
    with pytest.raises(CannotCapture, match=r"token \d+ of a captured step is not what MiniMaxForCausalLM computes"):
        Decoder(model, length=40, capture=True).prepare(5)


@pytest.mark.filterwarnings("ignore")
@quick(lambda rope_type: rope_type == "longrope")
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotations_that_change_with_the_length_change_between_replayed_steps(rope_type):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0], "original_max_position_embeddings": 24}
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    model = build_kind("qwen3_moe", max_position_embeddings=24, rope_parameters={**rope, **factors})
    model.set_experts_implementation("batched_mm")
    decoder = Decoder(model, length=60)
    recorded = replayed(decoder._step)
    for rows in (prompts(17), prompts(30), prompts(4)):  # over the border, beyond it, and back
        plain(model, prompts(1), 1)  # transformers keeps what a longer text left, until a short one comes
        expected = plain(model, rows, 24)
        assert [list(row) for row in zip(*decoder.generate(rows, 24), strict=True)] == expected
    assert not recorded.decisions


def test_a_model_that_reads_its_text_again_at_some_length_is_refused():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.0, "long_mscale": 1.2}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    said = "it reads its text again where its rotary embedding changes with the length"
    assert why_not(build_kind("phimoe", rope_parameters=rope)) == said


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kinds())
def test_captured_steps_of_every_kind_give_the_tokens_of_plain_generate(kind):
    model = build_kind(kind).cuda()
    model.set_experts_implementation("amoeba")
    if kind in REFUSED:
        pytest.skip(REFUSED[kind])
    rows = prompts(17, 3, 7)
    steps = Decoder(model, batch=3, length=40).generate(rows, TOKENS)
    assert [list(row) for row in zip(*steps, strict=True)] == plain(model, rows, TOKENS)
