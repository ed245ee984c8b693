"""The server with the clients that people use: the packages openai and langchain-openai."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from amoeba.jobs.generate.generate import generate
from amoeba.jobs.generate.options import GenerationOptions

openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'amoeba-moe[dev]'")
NAME = "tiny"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generated(folder, prompt: str, adapter: str | None = None, chat: bool = False, **options) -> str:
    """What `amoeba generate` writes."""
    given = GenerationOptions(device=torch.device("cpu"), chat=chat, **options)
    return generate(folder, prompt, given, lambda text: None, adapter).text


def said(text: str) -> list:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.3, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}]
)
def test_one_request_gets_the_text_of_amoeba_generate(folder, client, options):
    found = client.completions.create(model=NAME, prompt="Once upon", max_tokens=24, **options)
    assert found.choices[0].text == generated(folder, "Once upon", max_new_tokens=24, **options)
    assert found.choices[0].finish_reason in ("length", "stop")
    assert found.usage.prompt_tokens == 9 and found.usage.completion_tokens <= 24
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_chat_is_formatted_by_the_template_and_streams_the_same_text(folder, client):
    whole = client.chat.completions.create(model=NAME, messages=said("Once"), max_tokens=20, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == generated(folder, "Once", chat=True, max_new_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model=NAME, messages=said("Once"), max_completion_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content and len([text for text in texts if text]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_two_requests_at_once_keep_their_own_temperature_and_seed(folder, client):
    settings = [
        {"temperature": 0}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 2},
        {"temperature": 0.9, "top_k": 5, "seed": 3}, {"temperature": 1.2, "top_p": 0.7, "seed": 4},
    ]  # fmt: skip
    expected = [generated(folder, "Tell me", max_new_tokens=30, **each) for each in settings]
    assert len(set(expected)) == 5
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        given = dict(settings[number])
        more = {"extra_body": {"top_k": given.pop("top_k")}} if "top_k" in given else {}
        answer = client.completions.create(model=NAME, prompt="Tell me", max_tokens=30, **given, **more)
        found[number] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(5)] == expected


def test_several_choices_differ_and_each_is_a_seed_of_its_own(folder, client):
    found = client.completions.create(model=NAME, prompt="Tell me", max_tokens=12, temperature=1.5, seed=10, n=3)
    expected = [generated(folder, "Tell me", max_new_tokens=12, temperature=1.5, seed=10 + each) for each in range(3)]
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2]


def test_adapters_are_chosen_by_name_at_once(folder, adapters, client):
    names = [NAME, "first", "second"]
    assert [model.id for model in client.models.list()] == names
    expected = [
        generated(folder, "Once", adapter, max_new_tokens=20, temperature=0) for adapter in (None, *adapters.values())
    ]
    assert len(set(expected)) == 3
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        answer = client.completions.create(model=name, prompt="Once", max_tokens=20, temperature=0)
        found[name] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(name,)) for name in names * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[name] for name in names] == expected


def test_a_gguf_file_is_served_with_adapters(tmp_path, monkeypatch):
    """Its linear layers are in blocks only where no adapter goes onto them."""
    from server_thread import running

    from amoeba import lora
    from amoeba.integrations import block_linear
    from gguf_models import write_gguf
    from tiny_models import build

    monkeypatch.setattr(block_linear, "compute_dtype", lambda dtype, device: torch.float32)
    model = build("qwen3_moe", vocab_size=257, norm_topk_prob=True, max_position_embeddings=600, eos_token_id=256)
    path = write_gguf(tmp_path / "model.gguf", model, {"rest": "Q8_0"})
    lora.attach(model, r=2, alpha=64, targets=["experts", "o_proj"])
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    lora.save(model, tmp_path / "adapter")
    with (
        running(path, adapters={"mine": tmp_path / "adapter"}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model="mine", prompt="Once", max_tokens=12, temperature=0)
    assert answer.choices[0].text == generated(path, "Once", tmp_path / "adapter", max_new_tokens=12, temperature=0)


def test_a_stop_text_ends_the_answer_before_it(folder, client):
    text = generated(folder, "Once", max_new_tokens=40, temperature=0)
    stop = text[8:11]
    whole = client.completions.create(model=NAME, prompt="Once", max_tokens=40, temperature=0, stop=[stop, "never"])
    assert whole.choices[0].text == text[: text.index(stop)] and whole.choices[0].finish_reason == "stop"
    stream = client.completions.create(model=NAME, prompt="Once", max_tokens=40, temperature=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text[: text.index(stop)]


def test_logprobs_come_with_their_tokens(client):
    whole = client.chat.completions.create(
        model=NAME, messages=said("Once"), max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for each in content:
        assert len(each.top_logprobs) == 3 and each.logprob == each.top_logprobs[0].logprob <= 0
    old = client.completions.create(model=NAME, prompt="Once", max_tokens=4, temperature=0, logprobs=2)
    found = old.choices[0].logprobs
    assert len(found.token_logprobs) == len(found.tokens) == 4
    assert found.text_offset == [sum(map(len, found.tokens[:count])) for count in range(4)]
    rare = client.completions.create(model=NAME, prompt="Once", max_tokens=4, temperature=5, seed=1, logprobs=0)
    assert [[*each] for each in rare.choices[0].logprobs.top_logprobs] == [
        [each] for each in rare.choices[0].logprobs.tokens
    ]


def test_an_adapter_chats_by_its_own_template(folder, client, adapters):
    found = client.chat.completions.create(model="second", messages=said("Once"), max_tokens=9, temperature=0)
    assert found.usage.prompt_tokens == len("<Once>")
    expected = generated(folder, "Once", adapters["second"], chat=True, max_new_tokens=9, temperature=0)
    assert found.choices[0].message.content == expected


def test_tools_reach_the_template_and_calls_come_back(client, server, monkeypatch):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    seen = []
    own = server.served.chat_ids
    monkeypatch.setattr(server.served, "chat_ids", lambda *given: seen.append(own(*given)) or seen[-1])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [*said("Rain?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "yes"})
    client.chat.completions.create(model=NAME, messages=messages, tools=tools, max_tokens=2)
    text = server.served.loaded.tokenizer.decode(seen[0])
    assert text == "[tool weather][user]Rain?[assistant][call Bonn][tool]yes[assistant]"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_json_schema(client, stream):
    pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'amoeba-moe[dev]'")
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    found = client.chat.completions.create(
        model=NAME,
        messages=said("Rain?"),
        response_format=wanted,
        temperature=1.0,
        seed=1,
        max_tokens=200,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
    else:
        text = found.choices[0].message.content
        assert found.choices[0].finish_reason == "stop"
    answer = json.loads(text)
    assert answer["city"] in ("Bonn", "Rome") and isinstance(answer["rain"], bool)
    assert text == json.dumps(answer)  # on one line: no spaces without end


def test_langchain_talks_to_it(server, folder):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=15, max_retries=0
    )
    expected = generated(folder, "Once", chat=True, max_new_tokens=15, temperature=0)
    assert model.invoke("Once").content == expected
    assert "".join(str(chunk.content) for chunk in model.stream("Once")) == expected
