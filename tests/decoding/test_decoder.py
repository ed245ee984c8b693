"""The Decoder against `model.generate`, greedy: the same tokens, however the prompts come and however they are read."""

import pytest
import torch

from amoeba import lora
from amoeba.decoding import Decoder, Sampling, compiled_layers, why_not
from amoeba.decoding import decoder as decoder_module
from amoeba.integrations.place_experts import place_experts
from greedy_texts import TOKENS, decoded, endless, plain, prompts
from selection import each_value_once, quick

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
_models: dict[str, torch.nn.Module] = {}


@pytest.fixture(params=FAMILIES)
def model(request):
    return built(request.param)


def built(family: str):
    if family not in _models:
        _models[family] = endless(family)
    return _models[family]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(do_sample=True, temperature=0.7, top_k=9)], ids=["greedy", "cut"]
)
def test_logprobs_are_those_of_a_pass_over_the_text(sampling: Sampling) -> None:
    model, rows = built("qwen3_moe"), prompts(9, 3)
    decoder = Decoder(model, batch=2, length=9 + TOKENS, sampling=sampling, return_logprobs=True)
    list(decoder.generate(prompts(5, 5), 3))  # of which nothing is left
    found = decoded(model, rows, decoder=decoder)
    for row, new, logprobs in zip(rows, found, decoder.logprobs(TOKENS), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row + new])).logits[0, len(row) - 1 : -1]
        expected = (logits / sampling.temperature).log_softmax(-1)[range(TOKENS), new]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="return_logprobs=True"):
        Decoder(model, length=9).logprobs(1)


@each_value_once()
@pytest.mark.parametrize("lengths", [(1,), (19, 3, 7)], ids=["one_token", "a_batch"])
def test_the_tokens_are_those_of_plain_generate(model, lengths):
    rows = prompts(*lengths)
    expected = plain(model, rows)
    assert decoded(model, rows) == expected
    assert len({token for row in expected for token in row}) > 2  # a model that repeats itself would show little


def test_prompts_read_in_pieces_give_the_same(model, monkeypatch):
    monkeypatch.setattr(decoder_module, "PIECE", 10)  # of 5 tokens of two rows, with a rest
    rows = prompts(17, 2)
    assert decoded(model, rows, 5) == plain(model, rows, 5)


def test_prompts_read_by_a_step_of_fixed_shape_give_the_same(model, monkeypatch):
    """As a captured one does, with room after the prompt that is filled later."""
    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: True)
    rows = prompts(17, 2)
    assert decoded(model, rows, 5) == plain(model, rows, 5)


def test_prompts_of_similar_lengths_are_read_by_one_step_that_is_made_once(monkeypatch):
    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: True)
    made, own = [], decoder_module.Step
    monkeypatch.setattr(
        decoder_module, "Step", lambda *given, **more: made.append(more.get("tokens", 1)) or own(*given, **more)
    )
    model = built("qwen3_moe")
    decoder = Decoder(model, batch=1, length=100)
    for rows in (prompts(33), prompts(36), prompts(34), prompts(37)):
        assert decoded(model, rows, 2, decoder=decoder) == plain(model, rows, 2)
    assert made == [1, 36, 40]
    lengths = [decoder_module.prompt_length(tokens) for tokens in range(1, 4097)]
    assert all(tokens <= length <= max(16, tokens * 9 / 8) for tokens, length in enumerate(lengths, 1))
    assert len(set(lengths)) < 80


def test_one_decoder_serves_one_prompt_after_another():
    model = built("gpt_oss")
    decoder = Decoder(model, batch=1, length=60)
    for rows in (prompts(23), prompts(4), prompts(11)):
        assert decoded(model, rows, decoder=decoder) == plain(model, rows)


def test_the_repetition_penalty_counts_each_rows_own_tokens_and_no_padding():
    model, rows, sampling = built("qwen3_moe"), prompts(9, 2, 5), Sampling(repetition_penalty=1.7)
    expected = plain(model, rows, repetition_penalty=1.7)
    decoder = Decoder(model, batch=3, length=40, sampling=sampling)
    assert decoded(model, rows, decoder=decoder) == expected != plain(model, rows)
    seen = [set(row.nonzero().flatten().tolist()) for row in decoder._sampler._seen_BV]
    assert seen == [{*row, *new} for row, new in zip(rows, expected, strict=True)]


def test_the_first_token_comes_before_the_second_is_computed():
    model = built("mixtral")
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        next(Decoder(model, batch=1, length=40).generate(prompts(5), 20))
    finally:
        handle.remove()
    assert len(calls) == 1


def test_the_same_seed_gives_the_same_tokens_and_another_others():
    model, rows = built("qwen3_moe"), prompts(5, 8)
    decoder = Decoder(model, batch=2, length=40, sampling=Sampling(do_sample=True, temperature=1.5, top_k=40))
    first, again, other = (list(decoder.generate(rows, 12, seed)) for seed in (3, 3, 4))
    assert first == again != other
    fresh = Decoder(model, batch=2, length=40, sampling=Sampling(do_sample=True, temperature=1.5, top_k=40))
    assert list(fresh.generate(rows, 12, 3)) == first


def test_an_adapter_takes_part(model):
    rows = prompts(7, 3)
    without = plain(model, rows, 8)
    try:
        attach_random(model, ["experts", "o_proj"])
        assert decoded(model, rows, 8) == plain(model, rows, 8) != without
    finally:
        lora.detach(model)


def attach_random(model, targets: list[str]) -> None:
    """Factors that change the tokens."""
    attached = lora.attach(model, r=2, alpha=64, targets=targets)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in (*attached.experts.values(), *attached.linears.values()):
            for name, factor in layer.named_parameters():
                if "lora" in name:
                    factor.copy_(torch.randn(factor.shape, generator=generator) * 0.3)


@quick(lambda adapted, experts: adapted and experts == "resident")
@pytest.mark.parametrize("experts", ["resident", "mxfp4-weights"])
@pytest.mark.parametrize("adapted", [False, True], ids=["", "with_an_adapter"])
def test_a_compiled_layer_is_one_graph_for_all_layers(monkeypatch, tmp_path, adapted, experts):
    """Without Inductor, which takes a minute: that Dynamo traces it whole, and once."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(compiled_layers._run, dynamic=False, fullgraph=True, backend=backend)
    monkeypatch.setattr(compiled_layers, "_compiled", lambda: compiled)
    model = endless("qwen3_moe")
    place_experts(model, experts)
    if adapted:
        attach_random(model, ["experts"])
    rows = prompts(6)
    assert decoded(model, rows, 5, compiled=True) == plain(model, rows, 5)
    assert len(graphs) == 1


def test_what_does_not_fit_is_refused_in_a_sentence():
    decoder = Decoder(built("qwen3_moe"), batch=1, length=20)
    with pytest.raises(ValueError, match=r"length: expected 600 or more: the prompt and 597 new tokens; got 512"):
        decoder.generate(prompts(4), 597)
    with pytest.raises(ValueError, match=r"prompts: expected 1, none of them empty; got \[3, 4\]"):
        decoder.generate(prompts(3, 4), 2)
    with pytest.raises(ValueError, match=r"got \[0\]"):
        decoder.generate([[]], 2)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(1,), (19, 3, 7)], ids=["one_token", "a_batch"])
def test_captured_steps_give_the_tokens_of_plain_generate(family, lengths):
    model = endless(family).cuda()
    rows = prompts(*lengths)
    assert decoded(model, rows) == plain(model, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("adapted", [False, True], ids=["alone", "with_lora"])
@pytest.mark.parametrize("format", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_captured_steps_over_quantised_experts_give_the_tokens_of_plain_ones(format, adapted):
    """Of 8 rows by expert, of one by slot; and nothing waits for the GPU inside a step."""
    model = endless("qwen3_moe")
    place_experts(model, f"{format}-weights", trains=False, device=torch.device("cuda"))
    if adapted:
        attach_random(model, ["experts"])
    model.cuda()
    assert why_not(model) is None
    for rows in (prompts(5), prompts(4, 9, 1, 7, 3, 8, 2, 6)):
        decoder = Decoder(model, batch=len(rows), length=40)
        assert decoded(model, rows, decoder=decoder) == decoded(model, rows, capture=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder_module.Step(model, decoder._rows, decoder._choose)()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_captured_steps_sample_the_same_again():
    model, rows = endless("qwen3_moe").cuda(), prompts(5, 8)
    decoder = Decoder(model, batch=2, length=40, sampling=Sampling(do_sample=True, temperature=1.5))
    first, again, other = (list(decoder.generate(rows, 12, seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_inside_a_step():
    model = endless("qwen3_moe").cuda()
    decoder = Decoder(model, batch=1, length=40)
    tokens = decoder.generate(prompts(5), 30)
    next(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder._step()
        eager = decoder_module.Step(model, decoder._rows, decoder._choose)
        eager()  # the same without a graph
    finally:
        torch.cuda.set_sync_debug_mode("default")
