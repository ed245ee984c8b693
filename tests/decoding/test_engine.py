"""The engine against `model.generate`: every request gets the tokens that it gets alone, whatever runs next to it."""

import random
import threading

import pytest
import torch

import greedy_texts
from amoeba.decoding import engine as engine_module
from amoeba.decoding import slots as slots_module
from amoeba.decoding.decoder import Decoder, native_steps
from amoeba.decoding.engine import End, Engine, Request
from amoeba.decoding.sampling import Sampling
from greedy_texts import endless
from selection import each_value_once, quick
from tiny_models import VOCABULARY, build

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
_models: dict[str, torch.nn.Module] = {}


def built(family: str):
    if family not in _models:
        _models[family] = endless(family)
    return _models[family]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length + 1000 * seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def plain(model, ids: list[int], tokens: int) -> list[int]:
    return greedy_texts.plain(model, [ids], tokens)[0]


class Heard(list):
    """What a request received."""

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self[:-1]]

    @property
    def end(self) -> End:
        assert isinstance(self[-1], End) and sum(isinstance(each, End) for each in self) == 1
        return self[-1]


def asked(engine: Engine, ids: list[int], most: int, **options) -> Heard:
    heard = Heard()
    engine.submit(Request(ids, most, heard.append, **options))
    return heard


@each_value_once()
@pytest.mark.parametrize("together", [False, True], ids=["native_where_known", "plain_and_prompts_together"])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_come_and_go_get_the_tokens_of_plain_generate(family, together, monkeypatch):
    """More requests than rows, of different lengths: rows are freed, moved and taken again. Past a window of 16."""
    if together:
        monkeypatch.setattr(slots_module, "native_steps", lambda model, dense: "not wanted here")
    model = built(family)
    engine = Engine(model, slots=3, length=64, streams=together)
    sizes = [(5, 21), (1, 3), (19, 9), (7, 1), (2, 17), (11, 6), (5, 12)]
    heard = [asked(engine, prompt(length, seed), most) for seed, (length, most) in enumerate(sizes)]
    engine.finish_all()
    for seed, (length, most) in enumerate(sizes):
        assert heard[seed].ids == plain(model, prompt(length, seed), most)
        assert heard[seed].end == End("length")
    assert engine.active == engine.waiting == 0


def test_each_request_has_its_own_settings_and_draws_what_it_draws_alone():
    model = built("qwen3_moe")
    settings = [Sampling(True, 2.0), Sampling(), Sampling(True, 1.5, 20, 0.9), Sampling(True, 3.0, min_p=0.01)]

    def all_of(engine: Engine, choices) -> list[list[int]]:
        heard = [asked(engine, prompt(6), 12, sampling=settings[each], seed=each) for each in choices]
        engine.finish_all()
        return [each.ids for each in heard]

    alone = [all_of(Engine(model, slots=1, length=64), [each])[0] for each in range(4)]
    assert all_of(Engine(model, slots=4, length=64), range(4)) == alone
    assert all_of(Engine(model, slots=2, length=64), [3, 0, 2, 1]) == [alone[each] for each in (3, 0, 2, 1)]
    assert len({tuple(each) for each in alone}) == 4


def test_int8_weights_of_a_native_step_are_those_of_a_decoder():
    model = built("qwen3_moe")
    native = native_steps(model, "int8")
    if isinstance(native, str):
        pytest.skip(native)
    engine = Engine(model, slots=2, length=40, dense="int8")
    first, second = asked(engine, prompt(7), 9, logprobs=0), asked(engine, prompt(7), 9, logprobs=0)
    engine.finish_all()
    assert engine.kind == "native" and first == second
    decoder = Decoder(model, batch=1, length=40, native=native)
    assert first.ids == [token for (token,) in decoder.generate([prompt(7)], 9)]
    as_loaded = Engine(model, slots=2, length=40)
    other = asked(as_loaded, prompt(7), 9, logprobs=0)
    as_loaded.finish_all()
    # A prompt is read as loaded; the bits of its sums may still depend on where in memory its tensors lie.
    assert other[0].id == first[0].id and other[0].logprob == pytest.approx(first[0].logprob, abs=1e-5)
    assert abs(other[1].logprob - first[1].logprob) > 1e-4


def test_a_text_ends_at_its_end_token_and_at_no_other():
    model = built("mixtral")
    expected = plain(model, prompt(4), 12)
    engine = Engine(model, slots=2, length=64)
    end = expected[5]
    heard = asked(engine, prompt(4), 12, ends={end})
    other = asked(engine, prompt(4), 12)
    engine.finish_all()
    assert heard.ids == expected[: expected.index(end) + 1] and heard.end == End("stop")
    assert other.ids == expected


def test_a_cancelled_request_frees_its_row_and_the_others_go_on():
    model = built("qwen3_moe")
    engine = Engine(model, slots=1, length=64)
    heard, gone = Heard(), Heard()
    request = Request(prompt(3), 40, lambda told: (heard.append(told), request.cancel() if len(heard) == 4 else None))
    waits = Request(prompt(3), 4, gone.append)
    engine.submit(request)
    engine.submit(waits)
    last = asked(engine, prompt(8), 5)
    waits.cancel()
    engine.finish_all()
    assert len(heard.ids) == 4 and heard.end == End("cancelled")
    assert gone == [End("cancelled")]
    assert last.ids == plain(model, prompt(8), 5)


@quick(lambda family: family in ("qwen3_moe", "deepseek_v3"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_is_read_between_steps_and_short_ones_pass_it(family, monkeypatch):
    monkeypatch.setattr(engine_module, "CPU_PROMPT_TOKENS", 8)
    model = built(family)
    engine, order = Engine(model, slots=4, length=64), []

    def ask(name: str, ids: list[int], most: int) -> Heard:
        heard = Heard()
        engine.submit(Request(ids, most, lambda told: (heard.append(told), order.append(name))))
        return heard

    under_way = ask("under way", prompt(3), 30)
    engine.advance()
    long, gone = ask("long", prompt(37), 6), Request(prompt(38, 1), 6, (last := Heard()).append)
    engine.submit(gone)
    short = ask("short", prompt(5), 6)
    engine.advance()
    engine.advance()
    assert engine.active == 3 and engine.waiting == 1
    while "long" not in order:
        engine.advance()
    assert order.index("short") < order.index("long") and order.count("under way") >= 6
    engine.advance()
    gone.cancel()  # some of its prompt is read
    again = ask("again", prompt(33, 2), 6)
    engine.finish_all()
    assert last == [End("cancelled")]
    for heard, ids in ((long, prompt(37)), (short, prompt(5)), (again, prompt(33, 2))):
        assert heard.ids == plain(model, ids, 6)
    assert under_way.ids == plain(model, prompt(3), 30)
    assert engine.active == engine.waiting == 0 and engine.counts.prompt_tokens == 3 + 37 + 5 + 33


def test_a_prompt_that_begins_like_an_earlier_text_is_read_from_there_on(monkeypatch):
    monkeypatch.setattr(slots_module, "SHARED_PREFIX", 4)
    model = built("qwen3_moe")
    engine = Engine(model, slots=2, length=100)
    first = asked(engine, prompt(10), 6)
    engine.finish_all()
    conversation = prompt(10) + first.ids + prompt(5)
    second = asked(engine, conversation, 6)
    other = asked(engine, prompt(10)[:8] + prompt(9, 1), 6)
    engine.finish_all()
    assert second.ids == plain(model, conversation, 6)
    assert other.ids == plain(model, prompt(10)[:8] + prompt(9, 1), 6)
    assert engine.counts.shared_tokens == 14 + 8  # an answer up to the token before the last that was read


def test_logprobs_are_those_of_the_model():
    model, ids = built("qwen3_moe"), prompt(6)
    engine = Engine(model, slots=2, length=64)
    asked(engine, prompt(9), 8)
    heard = asked(engine, ids, 5, logprobs=3)
    engine.finish_all()
    text = torch.tensor([ids + heard.ids])
    with torch.no_grad():
        logprobs = model(text).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    for token, expected in zip(heard[:-1], logprobs, strict=True):
        assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-4)
        top = expected.topk(3)
        assert [each for each, _ in token.top] == top.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)


class Alternating:
    """Even tokens first, then odd ones."""

    def __init__(self):
        self.count = 0

    def allowed(self):
        return torch.arange(VOCABULARY) % 2 == self.count % 2

    def accept(self, token):
        assert token % 2 == self.count % 2
        self.count += 1


def test_a_grammar_holds_for_its_own_request_alone():
    model = built("qwen3_moe")
    engine = Engine(model, slots=3, length=64)
    free = asked(engine, prompt(5), 10)
    bound = [
        asked(engine, prompt(5), 10, grammar=Alternating(), sampling=each) for each in (Sampling(), Sampling(True, 2.0))
    ]
    engine.finish_all()
    assert free.ids == plain(model, prompt(5), 10)
    for each in bound:
        assert [token % 2 for token in each.ids] == [0, 1] * 5


def test_models_whose_state_is_no_row_of_a_cache_are_served_too(monkeypatch):
    monkeypatch.setattr(slots_module, "why_no_slots", lambda model: "of the test")
    model = built("mixtral")
    engine = Engine(model, slots=2, length=64)
    heard = [asked(engine, prompt(length), most) for length, most in ((5, 4), (3, 9), (8, 6))]
    engine.finish_all()
    for each, (length, most) in zip(heard, ((5, 4), (3, 9), (8, 6)), strict=True):
        assert each.ids == plain(model, prompt(length), most)


def test_a_request_that_comes_while_a_group_is_made_is_no_failure():
    class Ids(list):
        def __len__(self) -> int:
            if not late and engine.waiting > 1:
                late.append(asked(engine, prompt(4), 2))
            return super().__len__()

    late: list[Heard] = []
    engine = Engine(built("qwen3_moe"), slots=4, length=64)
    heard = [asked(engine, prompt(5), 3), asked(engine, Ids(prompt(6)), 3)]
    late.clear()
    engine.finish_all()
    assert engine.failure is None and [each.end for each in (*heard, *late)] == [End("length")] * 3


def test_a_failure_ends_every_request_and_the_engine_says_so(monkeypatch):
    engine = Engine(built("qwen3_moe"), slots=2, length=64)
    heard = [asked(engine, prompt(5), 20) for _ in range(3)]
    monkeypatch.setattr(engine._lanes[""].rows, "step", lambda *_: 1 / 0)
    engine.finish_all()
    assert [each.end for each in heard] == [End("error", "division by zero")] * 3
    assert engine.broken == "division by zero" and engine.active == engine.waiting == 0


def test_requests_from_many_threads_with_cancellations_leave_nothing_behind():
    model = built("qwen3_moe")
    engine = Engine(model, slots=3, length=64)
    worker = threading.Thread(target=engine.run)
    worker.start()
    chance, done = random.Random(0), []
    for number in range(24):
        heard, event = Heard(), threading.Event()

        def receive(told, heard=heard, event=event):
            heard.append(told)
            event.set() if isinstance(told, End) else None

        length, most = chance.randint(1, 12), chance.randint(1, 15)
        request = Request(prompt(length, number), most, receive)
        engine.submit(request)
        if number % 4 == 3:
            request.cancel()
            engine.wake()
        done.append((request, heard, event))
    engine.stop()
    worker.join(60)
    assert not worker.is_alive() and engine.active == engine.waiting == 0
    for request, heard, event in done:
        assert event.is_set()
        expected = plain(model, list(request.ids), request.most)
        assert heard.ids == (expected if heard.end == End("length") else expected[: len(heard.ids)])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_rows_that_come_and_go_give_plain_tokens(family):
    model = build(family, max_position_embeddings=128)
    model.set_experts_implementation("amoeba")
    model.generation_config.eos_token_id = None
    model.cuda()
    engine = Engine(model, slots=4, length=64)
    assert engine.kind == "captured"
    sizes = [(5, 21), (1, 3), (19, 9), (7, 1), (2, 17), (11, 6), (5, 12), (30, 8), (3, 30)]
    heard = [asked(engine, prompt(length, seed), most) for seed, (length, most) in enumerate(sizes)]
    drawn = [asked(engine, prompt(4), 9, sampling=Sampling(True, 2.0, 20), seed=3) for _ in range(2)]
    engine.finish_all()
    for seed, (length, most) in enumerate(sizes):
        assert heard[seed].ids == plain(model, prompt(length, seed), most)
    assert drawn[0].ids == drawn[1].ids
