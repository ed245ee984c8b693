"""Routing replay: what generation chose is what training uses, with the weights and gradients of the live router.

T tokens · K experts per token · E experts · L layers · N tokens of a text
"""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from amoeba import MoE, MoEConfig, RouterConfig, lora, replay
from amoeba.decoding import Decoder
from amoeba.decoding.step import Step
from amoeba.proof.reference import router as reference
from amoeba.replay import RoutingRecord
from greedy_texts import endless, prompts
from selection import each_value_once, quick
from tiny_models import EXPERTS, LAYERS, VOCABULARY, build

NEW = 7
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_tok": 3},
}
ROUTER = {
    "qwen3_moe": RouterConfig(EXPERTS, 2),
    "deepseek_v3": RouterConfig(EXPERTS, 3, score="sigmoid", scaling_factor=2.5),  # the choice is given
}
_built: dict[str, Any] = {}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> Any:
    return made(family)


def made(family: str) -> Any:
    if family not in _built:
        model = endless(family, **FAMILIES[family])
        for layer in model.model.layers if family == "deepseek_v3" else ():
            generator = torch.Generator().manual_seed(3)
            layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(EXPERTS, generator=generator) * 0.2)
        _built[family] = model
    return copy.deepcopy(_built[family])


def generated(model: Any, *lengths: int) -> tuple[list[list[int]], list[RoutingRecord]]:
    rows = prompts(*lengths)
    with replay.recording(model, rows=len(rows), length=max(lengths) + NEW) as recorder:
        steps = list(Decoder(model, batch=len(rows), length=max(lengths) + NEW).generate(rows, NEW))
    texts = [row + [tokens[place] for tokens in steps] for place, row in enumerate(rows)]
    return texts, recorder.take(texts)


def padded(texts: list[list[int]], left: bool = True) -> tuple[Tensor, Tensor]:
    length = max(map(len, texts))
    rows = []
    for text in texts:
        pad, kept = [0] * (length - len(text)), [1] * len(text)
        rows.append((pad + text, pad + kept) if left else (text + pad, kept + pad))
    ids, mask = (torch.tensor(each) for each in zip(*rows, strict=True))
    return ids, mask


def disturbed(model: Any) -> Any:
    """Its routers choose others, as after a step of training."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight))
    return model


def outcome(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **options).logits
    keep = torch.ones_like(ids) if mask is None else mask
    (logits * keep[..., None]).square().sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chosen_in(model: Any, run: Any) -> list[Tensor]:
    """expert_TK of each layer."""
    found: list[Tensor] = []
    experts = [layer.mlp.experts for layer in model.model.layers]
    hooks = [module.register_forward_pre_hook(lambda _, args: found.append(args[1])) for module in experts]
    run()
    for hook in hooks:
        hook.remove()
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        assert torch.equal(gradient, expected[1][name]), name


def test_what_decoding_chose_is_what_a_training_pass_uses(model) -> None:
    texts, records = generated(model, 5, 2)
    ids, mask = padded(texts)
    disturbed(model)
    live = chosen_in(model, lambda: outcome(model, ids, mask))

    def run() -> None:
        with replay.replaying(model, records, ids, mask):
            outcome(model, ids, mask)

    for layer, expert_TK in enumerate(chosen_in(model, run)):
        rows = expert_TK.view(*ids.shape, -1)
        for row, (record, kept) in enumerate(zip(records, mask.bool(), strict=True)):
            assert torch.equal(rows[row][kept][:-1].int(), record.expert_NLK[:-1, layer])
        assert not torch.equal(expert_TK, live[layer])


def test_where_the_ids_coincide_no_bit_changes(model) -> None:
    texts, records = generated(model, 5, 2)
    ids, mask = padded(texts)
    expected = outcome(model, ids, mask)
    with replay.replaying(model, records, ids, mask):
        found = outcome(model, ids, mask)
    assert_same(found, expected)
    assert_same(outcome(model, ids, mask), expected)  # and it left nothing behind


class ReferenceRouter(nn.Module):
    """The weights of given experts by the reference's loops, in fp64; autograd finds the gradient."""

    def __init__(self, weight: nn.Parameter, expert_TK: Tensor, config: RouterConfig) -> None:
        super().__init__()
        self.weight, self.expert_TK, self.config = weight, expert_TK, config

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = hidden_states.reshape(-1, hidden_states.shape[-1]) @ self.weight.T
        chosen = self.expert_TK.tolist()
        weights = [reference._weigh(logits, each, self.config) for logits, each in zip(logits_TE, chosen, strict=True)]
        return logits_TE, torch.stack(weights), self.expert_TK


def test_gradients_are_those_of_the_reference_with_these_experts(family, model) -> None:
    texts, records = generated(model, 6, 6)
    ids, mask = padded(texts)
    records = [record[:-1] for record in records]
    ids, mask = ids[:, :-1], mask[:, :-1]
    disturbed(model)
    with replay.replaying(model, records, ids):
        logits, gradients = outcome(model, ids, mask)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    for number, layer in enumerate(exact.model.layers):
        expert_TK = torch.cat([record.expert_NLK[:, number] for record in records]).long()
        layer.mlp.gate = ReferenceRouter(layer.mlp.gate.weight, expert_TK, ROUTER[family])
    expected_logits, expected = outcome(exact, ids, mask)
    assert (logits - expected_logits).norm() < 1e-5 * expected_logits.norm()
    assert gradients.keys() == expected.keys() and any("gate.weight" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() < 2e-5 * expected[name].norm(), name


@each_value_once()
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_uses_the_same_experts(model, reentrant: bool) -> None:
    texts, records = generated(model, 5, 3)
    ids, mask = padded(texts)
    disturbed(model).train()
    with replay.replaying(model, records, ids, mask):
        expected = outcome(model, ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with replay.replaying(model, records, ids, mask):
        found = outcome(model, ids, mask)
    if not reentrant:
        return assert_same(found, expected)
    for name, gradient in found[1].items():  # its first pass has no gradients, so other kernels compute it
        assert (gradient - expected[1][name]).norm() < 1e-5 * expected[1][name].norm(), name


def test_a_recomputation_after_the_end_is_refused() -> None:
    model = made("qwen3_moe")
    texts, records = generated(model, 4, 4)
    ids, _ = padded(texts)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="backward inside"), replay.replaying(model, records, ids):
        model(input_ids=ids, use_cache=False)
    with replay.replaying(model, records, ids) as loaded:
        model(input_ids=ids, use_cache=False)
        with pytest.raises(ValueError, match="backward inside"):
            loaded.load(records, ids)
    with torch.no_grad(), replay.replaying(model, records, ids):
        model(input_ids=ids, use_cache=False)


def test_padded_and_packed_tokens_get_their_own_experts() -> None:
    model = made("qwen3_moe")
    texts, records = generated(model, 6, 3)
    disturbed(model)
    alone = []
    for text, record in zip(texts, records, strict=True):
        with replay.replaying(model, [record], torch.tensor([text])):
            alone.append(outcome(model, torch.tensor([text]))[0][0])
    for left in (True, False):
        ids, mask = padded(texts, left)
        with replay.replaying(model, records, ids, mask):
            logits, _ = outcome(model, ids, mask)
        for row, expected in enumerate(alone):
            torch.testing.assert_close(logits[row][mask[row].bool()], expected, rtol=1e-4, atol=1e-5)
    packed = torch.tensor([texts[0] + texts[1]])
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    with replay.replaying(model, [records], packed):
        logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits[0], torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_transformers_own_generate_is_recorded_as_the_decoder_is(model) -> None:
    texts, records = generated(model, 5, 2)
    ids, mask = padded([text[:-NEW] for text in texts])
    with replay.recording(model, rows=2, length=30) as recorder:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    found = recorder.take([row[-len(text) :].tolist() for row, text in zip(out, texts, strict=True)])
    for one, other in zip(found, records, strict=True):
        assert torch.equal(one.tokens_N, other.tokens_N) and torch.equal(one.expert_NLK, other.expert_NLK)
        assert (one.expert_NLK[:-1] >= 0).all() and (one.expert_NLK[-1] == -1).all()


def test_a_step_of_fixed_shape_leaves_no_trace_of_its_filling(monkeypatch) -> None:
    """A captured prompt is longer than the prompt; and it records into the same memory each time."""
    model = made("qwen3_moe")
    texts, records = generated(model, 5, 2)
    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: True)
    with replay.recording(model, rows=2, length=40) as recorder:
        decoder, addresses = Decoder(model, batch=2, length=40), set()
        for rows in (prompts(9, 4), [text[:-NEW] for text in texts]):
            list(decoder.generate(rows, NEW))
            addresses.add(recorder.expert_LSK.data_ptr())
    assert len(addresses) == 1
    for one, other in zip(recorder.take(texts), records, strict=True):
        assert torch.equal(one.expert_NLK, other.expert_NLK)


def test_padding_that_is_a_document_of_its_own_is_no_text(monkeypatch) -> None:
    """As captured prompts on a GPU are read: without a mask."""
    model, enter = made("qwen3_moe"), Step._enter

    def by_documents(step: Step, stack: Any, compiled: bool, fused: bool = False) -> None:
        enter(step, stack, compiled, fused)
        step._by_documents = step.tokens > 1

    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: True)
    monkeypatch.setattr(Step, "_enter", by_documents)
    texts, records = generated(model, 5, 2)
    for text, record in zip(texts, records, strict=True):
        assert record.tokens_N.tolist() == text and (record.expert_NLK[:-1] >= 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(5,), (70, 5, 2)], ids=str)
def test_captured_steps_and_prompts_are_recorded_and_replayed_on_a_gpu(model, lengths: tuple[int, ...]) -> None:
    model = model.cuda()
    texts, records = generated(model, *lengths)
    ids, mask = (each.cuda() for each in padded(texts))
    disturbed(model)

    def run() -> None:
        with replay.replaying(model, records, ids, mask):
            outcome(model, ids, mask)

    for layer, expert_TK in enumerate(chosen_in(model, run)):
        rows = expert_TK.view(*ids.shape, -1).cpu()
        for row, (record, kept) in enumerate(zip(records, mask.bool().cpu(), strict=True)):
            assert torch.equal(rows[row][kept][:-1].int(), record.expert_NLK[:-1, layer].int())


def test_texts_may_end_before_their_row_does() -> None:
    model = made("qwen3_moe")
    texts, records = generated(model, 5, 2)
    rows = [text[:-NEW] for text in texts]
    with replay.recording(model, rows=2, length=30) as recorder:
        list(Decoder(model, batch=2, length=30).generate(rows, NEW))
    cut = recorder.take([texts[0][:-3], texts[1]])
    assert torch.equal(cut[0].expert_NLK, records[0].expert_NLK[:-3])  # the last of these was read
    assert torch.equal(cut[0].expert_NLK, records[0][:-3].expert_NLK)


def test_a_model_with_lora_factors_is_recorded_and_replayed(model) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lora.attach(model, r=3, alpha=6)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.1)
    texts, records = generated(model, 5, 2)
    ids, mask = padded(texts)
    expected = outcome(model, ids, mask)
    with replay.replaying(model, records, ids, mask):
        found = outcome(model, ids, mask)
    assert_same(found, expected)
    assert found[1] and all("lora" in name for name in found[1])


@quick(lambda family: family == "qwen3_moe")
def test_layers_compiled_one_by_one_replay(model) -> None:
    texts, records = generated(model, 5, 2)
    ids, mask = padded(texts)
    disturbed(model)
    with replay.replaying(model, records, ids, mask):
        expected = outcome(model, ids, mask)
    for layer in model.model.layers:
        layer.mlp.gate.compile(backend="aot_eager", fullgraph=True)
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    with replay.replaying(model, records, ids, mask):
        logits, gradients = outcome(model, ids, mask)
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - expected[1][name]).norm() <= 1e-4 * expected[1][name].norm(), name


def test_replay_closes_the_gap_between_generation_and_training() -> None:
    """Of a model whose experts matter: rounding sends some tokens to others, which moves log-probabilities by far more
    than rounding itself. Here 8 % of the choices differ, and 20 % of the tokens in some layer; the mean and the largest
    |difference| are 0.053 and 0.63, with replay 0.0088 and 0.060 (Neoverse-N1, 2026-11-18)."""
    model = build("qwen3_moe", num_hidden_layers=6, num_experts=32, num_experts_per_tok=4, max_position_embeddings=128)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.mlp.experts.parameters():
                parameter.mul_(4.0)
    model.bfloat16().set_experts_implementation("amoeba")
    ids = torch.randint(3, VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(0))

    def log_probabilities(logits: Tensor) -> Tensor:
        return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def in_one_pass() -> Tensor:
        return log_probabilities(model(input_ids=ids, use_cache=False).logits)

    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        with replay.recording(model, rows=4, length=40) as recorder:
            steps = [model(input_ids=each, past_key_values=cache).logits for each in ids.split(1, dim=1)]
        generated_with, rollout = recorder.take(ids.tolist()), log_probabilities(torch.cat(steps, 1))
        with replay.recording(model, rows=4, length=40) as recorder:
            live = in_one_pass() - rollout
        with replay.replaying(model, generated_with, ids):
            forced = in_one_pass() - rollout
    pairs = zip(generated_with, recorder.take(ids.tolist()), strict=True)
    others = torch.cat([(a.expert_NLK.sort(-1)[0] != b.expert_NLK.sort(-1)[0]).any(-1) for a, b in pairs])
    found = [float(each) for gap in (live, forced) for each in (gap.abs().mean(), gap.abs().max())]
    shares = float(others.float().mean()), float(others.any(-1).float().mean())
    assert found[0] > 3 * found[2] and found[1] > 3 * found[3], (shares, found)


# --- amoeba.MoE


class Stack(nn.Module):
    def __init__(self, **router: Any) -> None:
        super().__init__()
        config = MoEConfig(16, 8, RouterConfig(8, 3, **router))
        self.layers = nn.ModuleList(MoE(config) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("router", [{}, {"score": "sigmoid", "selection_bias": True}, {"capacity_factor": 0.8}])
def test_layers_without_transformers_record_and_replay(router: dict) -> None:
    torch.manual_seed(0)
    model, x = Stack(**router), torch.randn(2, 5, 16)
    text = torch.arange(5)  # which such a model does not know
    with replay.recording(model, rows=2, length=5) as recorder:
        expected = model(x)
    records = recorder.take([text, text])
    ids = torch.stack((text, text))
    with replay.replaying(model, records, ids):
        assert torch.equal(model(x), expected)
    weight = torch.nn.init.normal_(model.layers[0].gate.weight)
    found: list[Any] = []
    hook = model.layers[0].gate.register_forward_hook(lambda _, args, routing: found.append(routing))
    model(x)
    live, found = found, []
    with replay.replaying(model, records, ids):
        model(x).sum().backward()
    hook.remove()
    expected_TK = torch.cat([record.expert_NLK[:, 0] for record in records])
    chosen_TK = found[0].expert_TK if found[0].chosen_TK is None else found[0].chosen_TK
    assert torch.equal(chosen_TK.int(), expected_TK) and not torch.equal(live[0].expert_TK, found[0].expert_TK)
    assert weight.grad.abs().sum() > 0


# --- records of other engines


def test_records_of_vllm_are_taken_as_they_come() -> None:
    """One row less than tokens; layers without experts may be counted too, as rows of zeros."""
    model = build("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    with replay.recording(model, rows=1, length=6) as recorder, torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]]), use_cache=False)
    (own,) = recorder.take([[5, 6, 7, 8, 9, 10]])
    routed = own.expert_NLK[:-1].to(torch.int16).numpy()
    ids = torch.tensor([own.tokens_N.tolist()])
    with_dense = torch.cat((torch.zeros(5, 1, 2, dtype=torch.int16), own.expert_NLK[:-1].short()), 1).numpy()
    for expert_NLK in (routed, with_dense):
        imported = RoutingRecord(own.tokens_N.tolist(), expert_NLK)
        with replay.replaying(model, [imported], ids) as loaded:
            model(input_ids=ids, use_cache=False)
        assert torch.equal(loaded._loaded[2][:, :-1].int(), own.expert_NLK[:-1].transpose(0, 1))


# --- what does not fit


@pytest.fixture(scope="module")
def fitting() -> Any:
    model = made("qwen3_moe")
    texts, records = generated(model, 4, 4)
    return SimpleNamespace(model=model, texts=texts, records=records, ids=padded(texts)[0])


def with_ids(record: RoutingRecord, change: Any) -> RoutingRecord:
    expert_NLK = record.expert_NLK.clone()
    change(expert_NLK)
    return RoutingRecord(record.tokens_N, expert_NLK)


def too_large(ids: Tensor) -> None:
    ids[3, 1, 0] = EXPERTS


def twice(ids: Tensor) -> None:
    ids[3, 1] = ids[3, 1, 0]


def half_a_row(ids: Tensor) -> None:
    ids[3, 1, 0] = -1


def below(ids: Tensor) -> None:
    ids[3, 1] = -2


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (lambda r: r[:-1], r"records\[1\]: expected the 11 tokens.*got 10"),
        (lambda r: r[1:], "expected the 11 tokens"),
        (lambda r: RoutingRecord(r.tokens_N.flip(0), r.expert_NLK), r"records\[1\].*the text of this row.*token"),
        (lambda r: RoutingRecord(r.tokens_N, r.expert_NLK[:, :1]), "expected 2 MoE layers; got 1"),
        (lambda r: RoutingRecord(r.tokens_N, r.expert_NLK.repeat(1, 2, 1)), "expected 2 MoE layers; got 4"),
        (lambda r: RoutingRecord(r.tokens_N, r.expert_NLK[..., :1]), "one number of experts per token"),
        (lambda r: RoutingRecord(r.tokens_N, r.expert_NLK, "mixtral, 2 MoE layers of 6 experts"), "a record of qwen3"),
        (lambda r: with_ids(r, too_large), r"below the number of experts \(6\).*token 3 in model.layers.1.mlp.experts"),
        (lambda r: with_ids(r, below), "below the number of experts"),
        (lambda r: with_ids(r, twice), "each expert of a token once"),
        (lambda r: with_ids(r, half_a_row), "or -1 in all of them"),
        (lambda r: [r, r], "expected the 11 tokens.*got 22"),
        (lambda r: [], "expected the 11 tokens.*got 0"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_before_any_pass(fitting, poison: Any, said: str) -> None:
    records = [fitting.records[0], poison(fitting.records[1])]
    with pytest.raises(ValueError, match=said), replay.replaying(fitting.model, records, fitting.ids):
        pytest.fail("it was replayed")


def test_records_in_another_order_are_refused(fitting) -> None:
    with pytest.raises(ValueError, match="Keep the rows in order"):
        replay.Replay(fitting.model, fitting.records[::-1], fitting.ids, None)
    with pytest.raises(ValueError, match="one for each of the records"):
        replay.Replay(fitting.model, fitting.records[:1], fitting.ids, None)
    with pytest.raises(ValueError, match="attention_mask: expected the shape"):
        replay.Replay(fitting.model, fitting.records, fitting.ids, torch.ones(2, 3))


def test_records_with_another_top_k_are_refused_in_the_first_pass(fitting) -> None:
    records = [RoutingRecord(r.tokens_N, r.expert_NLK[..., :1]) for r in fitting.records]
    with pytest.raises(ValueError, match=r"2 experts per token|a choice of 1 among 6"):  # noqa: SIM117
        with replay.replaying(fitting.model, records, fitting.ids):
            fitting.model(input_ids=fitting.ids, use_cache=False)


def test_a_pass_over_another_text_is_told_at_the_end(fitting) -> None:
    other = fitting.ids.clone()
    other[1, 3] += 1
    with pytest.raises(ValueError, match="the tokens that were loaded"):  # noqa: SIM117
        with replay.replaying(fitting.model, fitting.records, fitting.ids):
            fitting.model(input_ids=other, use_cache=False)
    for part in (fitting.ids[:1], fitting.ids[:, :-1]):
        with pytest.raises(ValueError, match="the whole batch that was loaded"):  # noqa: SIM117
            with replay.replaying(fitting.model, fitting.records, fitting.ids):
                fitting.model(input_ids=part, use_cache=False)


def test_a_part_of_the_model_is_not_called_by_itself(fitting) -> None:
    with pytest.raises(ValueError, match="a call of a part"):  # noqa: SIM117
        with replay.replaying(fitting.model, fitting.records, fitting.ids):
            fitting.model.model(input_ids=fitting.ids, use_cache=False)


def test_a_router_that_does_not_follow_is_refused_by_name(fitting, monkeypatch) -> None:
    gate = fitting.model.model.layers[1].mlp.gate

    def by_sorting(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.flatten(0, -2), gate.weight)
        weights, ids = logits.softmax(-1).sort(descending=True)
        return logits, weights[:, :2], ids[:, :2]

    def asks_and_goes_its_own_way(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = by_sorting(hidden_states)
        logits.topk(2)
        return logits, weights, (ids + 1) % EXPERTS

    for forward, said in (
        (by_sorting, "layers.1.mlp.experts: expected a choice of 2 among 6 experts by torch.topk"),
        (asks_and_goes_its_own_way, "a router that follows; got.*model.layers.1.mlp.experts"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gate, "forward", forward)
            with pytest.raises(ValueError, match=said):  # noqa: SIM117
                with replay.replaying(fitting.model, fitting.records, fitting.ids):
                    fitting.model(input_ids=fitting.ids, use_cache=False)


def test_a_recording_is_taken_with_the_text_that_was_read(fitting) -> None:
    model, texts = fitting.model, fitting.texts
    with replay.recording(model, rows=2, length=8) as recorder, torch.no_grad():
        with pytest.raises(ValueError, match="a whole pass of the model"):
            recorder.take(texts)
        with pytest.raises(ValueError, match="rows: expected passes of 2 rows; got 1"):
            model(input_ids=fitting.ids[:1], use_cache=False)
        for mask in (torch.ones(2, 1, 11, 11), torch.ones(2, 10)):
            with pytest.raises(ValueError, match="attention_mask: expected two dimensions"):
                model(input_ids=fitting.ids, attention_mask=mask, use_cache=False)
        model(input_ids=fitting.ids, use_cache=False)  # 11 tokens, of which 8 have room
        with pytest.raises(ValueError, match=r"texts\[0\]: expected at most 9 tokens.*length \(8\)"):
            recorder.take(texts)
        with pytest.raises(ValueError, match=r"texts\[0\]: expected the text of this row"):
            recorder.take([text[:8] for text in texts[::-1]])
        with pytest.raises(ValueError, match="one for each row"):
            recorder.take(texts[:1])
        for found, own in zip(recorder.take([text[:8] for text in texts]), fitting.records, strict=True):
            assert torch.equal(found.expert_NLK, own.expert_NLK[:8])


def test_a_pass_that_was_broken_off_is_not_taken_for_a_record(fitting, monkeypatch) -> None:
    model = fitting.model

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with replay.recording(model, rows=2, length=11) as recorder, torch.no_grad():
        model(input_ids=fitting.ids.flip(1), use_cache=False)
        monkeypatch.setattr(model.model.layers[1].mlp.gate, "forward", broken)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=fitting.ids, use_cache=False)
        with pytest.raises(ValueError, match="a whole pass of the model"):
            recorder.take(fitting.texts)


def test_recordings_of_one_size_share_their_memory_and_not_their_contents(fitting) -> None:
    """A captured step goes on writing where it was captured."""
    model, addresses = fitting.model, set()
    for _ in range(2):
        with replay.recording(model, rows=2, length=11) as recorder, torch.no_grad():
            with pytest.raises(ValueError, match="a Decoder that was prepared before"):
                recorder.take(fitting.texts)
            model(input_ids=fitting.ids, use_cache=False)
        addresses.add(recorder.expert_LSK.data_ptr())
        recorder.take(fitting.texts)
    assert len(addresses) == 1
    copied = copy.deepcopy(model)
    with replay.recording(copied, rows=2, length=11) as recorder:
        copied(input_ids=fitting.ids, use_cache=False)
    assert recorder.expert_LSK.data_ptr() not in addresses
    forgotten = weakref.ref(recorder)
    del copied, recorder
    gc.collect()
    assert forgotten() is None


def test_layers_that_run_again_in_backward_record_nothing(fitting) -> None:
    model = copy.deepcopy(fitting.model).train()
    model.gradient_checkpointing_enable()
    with replay.recording(model, rows=2, length=11) as recorder:
        first = model(input_ids=fitting.ids.flip(1), use_cache=False).logits.sum()
        model(input_ids=fitting.ids, use_cache=False)
        expected = recorder.take(fitting.texts)
        first.backward()
    for found, other in zip(recorder.take(fitting.texts), expected, strict=True):
        assert torch.equal(found.expert_NLK, other.expert_NLK)


def test_batches_of_one_shape_are_loaded_one_after_another(fitting) -> None:
    model, ids, records = fitting.model, fitting.ids, fitting.records
    expected = []
    for order in (slice(None), slice(None, None, -1)):
        batch = torch.tensor(ids.tolist()[order])
        with replay.replaying(model, records[order], batch):
            expected.append(outcome(model, batch))
    with replay.replaying(model, records, ids) as loaded:
        address = loaded.states[0].expert_TK.data_ptr()
        assert_same(outcome(model, ids), expected[0])
        loaded.load(records[::-1], ids.flip(0))
        assert_same(outcome(model, ids.flip(0)), expected[1])
        with pytest.raises(ValueError, match="rows, tokens and K as before"):
            loaded.load([record[:-1] for record in records], ids[:, :-1])
    assert loaded.states[0].expert_TK.data_ptr() == address


def test_one_model_is_recorded_or_replayed_once_at_a_time(fitting) -> None:
    model = fitting.model
    before = [type(module) for module in model.modules()]
    with replay.recording(model, rows=2, length=8):  # noqa: SIM117
        with pytest.raises(ValueError, match="neither recorded nor replayed"):
            with replay.replaying(model, fitting.records, fitting.ids):
                pytest.fail("both at once")
    assert [type(module) for module in model.modules()] == before and not model._forward_pre_hooks
    with pytest.raises(ValueError, match=r"MoE layers of amoeba\.MoE or of transformers"):
        replay.Recorder(nn.Linear(2, 2), 1, 1)


@pytest.mark.parametrize(
    ("tokens", "experts", "said"),
    [
        ([1, 2, 3], torch.zeros(5, 2, 2, dtype=torch.int16), "a row for each of the 3 tokens, or for all but the last"),
        ([1, 2, 3], torch.zeros(1, 2, 2, dtype=torch.int16), "got 1 row"),
        ([1, 2, 3], torch.zeros(3, 4, dtype=torch.int16), "tokens, layers, experts per token"),
        ([1, 2, 3], torch.zeros(3, 2, 2), "expert ids"),
        ([[1, 2, 3]], torch.zeros(3, 2, 2, dtype=torch.int16), "the token ids of one text"),
    ],
)
def test_a_record_is_checked_when_it_is_made(tokens: Any, experts: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RoutingRecord(tokens, experts)


def test_all_layers_of_a_tiny_model_are_recorded(fitting) -> None:
    assert fitting.records[0].expert_NLK.shape == (11, LAYERS, 2)
    assert fitting.records[0].model == "qwen3_moe, 2 MoE layers of 6 experts"
