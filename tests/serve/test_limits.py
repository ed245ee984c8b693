"""What clients do wrong, and what happens to the others: refusals in a sentence, no row that stays taken."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from server_thread import running

from amoeba.jobs.generate.options import GenerationOptions
from called import call as command

NAME = "tiny"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 5, "temperature": 0}
TEXT = {"model": NAME, "prompt": "Once", "max_tokens": 5, "temperature": 0}


def call(server, path: str, body=None, method: str = "POST", key: str | None = None):
    """Status, document, headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if text.startswith("{") else text, response.headers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1}, "temperature: expected a number from 0"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p: expected 0 < top_p <= 1"),
        ({"top_k": -3}, "top_k: expected at least 0"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n:"),
        ({"n": 99}, "n:"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop: expected at most 16 texts"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 texts"),
        ({"messages": []}, "messages"),
        ({"messages": "Once"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: expected parts of type text"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt: expected 1 to 500 tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty: expected 0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias: expected none"),
        ({"tool_choice": "required"}, "tool_choice: expected auto or none"),
        ({"response_format": {"type": "yaml"}}, "response_format: expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected a schema"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages: expected tool_calls that are a list"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages: expected tool_calls that are a list"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs: expected variables"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs: expected variables"),
    ],
)
def test_a_bad_value_is_refused_with_a_sentence(server, changes, words):
    status, document, _ = call(server, "/v1/chat/completions", CHAT | changes)
    assert status == 422 and words in document["error"]["message"], document
    assert document["error"]["type"] == "invalid_request_error"


def test_a_schema_without_xgrammar_is_refused_in_a_sentence(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    wanted = {"response_format": {"type": "json_object"}}
    status, document, _ = call(server, "/v1/chat/completions", CHAT | wanted)
    assert status == 422 and "pip install xgrammar" in document["error"]["message"]


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [300], ["a"] * 17, 5])
def test_a_bad_prompt_is_refused(server, prompt):
    status, document, _ = call(server, "/v1/completions", TEXT | {"prompt": prompt})
    assert (status == 422 and "expected" in document["error"]["message"]) or "valid" in document["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": "tiny"}', b"null"])
def test_a_malformed_body_is_refused(server, body):
    status, document, _ = call(server, "/v1/chat/completions", body)
    assert status == 422 and document["error"]["message"]


def test_compile_is_refused_because_steps_of_several_rows_are_not_compiled(folder):
    from amoeba.serve.served_model import open_model

    with pytest.raises(ValueError, match="--compile: expected no compiling with serve and --prompts"):
        open_model(folder, GenerationOptions(compile=True, device=torch.device("cpu")))


def test_an_unknown_model_and_an_unknown_path_are_not_found(server):
    status, document, _ = call(server, "/v1/chat/completions", CHAT | {"model": "gpt"})
    assert status == 404 and document["error"]["code"] == "model_not_found" and "tiny" in document["error"]["message"]
    assert call(server, "/v1/models/gpt", method="GET")[0] == 404
    assert call(server, "/v1/models/first", method="GET")[1]["parent"] == NAME
    assert call(server, "/v1/embeddings", {})[0] == 404
    assert call(server, "/v1/chat/completions", method="GET")[0] == 405


def test_health_metrics_and_status_tell_what_happened(server):
    before = call(server, "/status", method="GET")[1]["generated_tokens"]
    found = call(server, "/v1/completions", TEXT)[1]
    assert call(server, "/health", method="GET")[:2] == (200, {"status": "ok"})
    status = call(server, "/status", method="GET")[1]
    assert status["generated_tokens"] - before == found["usage"]["completion_tokens"]
    assert status["models"][0] == NAME and status["active"] == 0 and status["expert_cache"] is None
    metrics = call(server, "/metrics", method="GET")[1]
    assert 'amoeba_requests_total{path="/v1/completions",status="200"}' in metrics
    assert "amoeba_first_token_seconds_bucket" in metrics
    assert f"amoeba_generated_tokens_total {float(status['generated_tokens'])}" in metrics


def test_a_key_is_needed_where_one_is_set(folder):
    with running(folder, api_key="secret") as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for key in (None, "wrong", ""):
                status, document, headers = call(server, path, body, key=key)
                assert status == 401 and document["error"]["code"] == "invalid_api_key"
                assert headers["WWW-Authenticate"] == "Bearer"
            assert call(server, path, body, key="secret")[0] == 200
        assert [call(server, path, method="GET")[0] for path in ("/v1/models", "/status")] == [401, 401]
        assert [call(server, path, method="GET")[0] for path in ("/", "/health", "/metrics")] == [200, 200, 200]


def test_more_requests_than_may_wait_get_429_and_the_rest_is_answered(folder):
    from amoeba.serve.server import Limits

    with running(folder, limits=Limits(queue=2), slots=1) as server:
        statuses: list[int] = []
        body = TEXT | {"max_tokens": 200}

        def ask() -> None:
            statuses.append(call(server, "/v1/completions", body)[0])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        status, document, headers = call(server, "/v1/completions", body | {"n": 4})
        assert status == 429 and headers["Retry-After"] == "1" and "at most 3 answers" in document["error"]["message"]
        assert server.idle() and call(server, "/v1/completions", TEXT)[0] == 200


def test_a_body_that_is_too_long_or_too_slow_is_refused(folder):
    from amoeba.serve.server import Limits

    with running(folder, limits=Limits(body=2000, body_seconds=0.5)) as server:
        status, document, _ = call(server, "/v1/completions", TEXT | {"prompt": "x" * 3000})
        assert status == 413 and "at most 2000 bytes" in document["error"]["message"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", b" " * 20_000_000, {"Connection": "close"})
        assert connection.getresponse().status == 413
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\n"
            raw.sendall(head + b"Content-Length: 3000\r\n\r\n")
            assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
            raw.sendall(head + b"1000\r\n" + b" " * 4096)  # no length is told
            assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 50\r\n\r\n{")
            assert b" 408 " in raw.recv(4096).split(b"\r\n")[0]
        assert call(server, "/v1/completions", TEXT)[0] == 200


def leave(server, body: dict, after: int) -> None:
    """A client that closes its connection after this many bytes of the answer."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(data)}\r\n\r\n"
        raw.sendall(head.encode() + data)
        if after:
            raw.recv(after)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server, stream):
    body = TEXT | {"max_tokens": 450, "stream": stream}
    before = server.served.engine.counts.generated_tokens
    for _ in range(6):
        leave(server, body, after=200 if stream else 0)
    for _ in range(10):
        leave(server, body, after=0)  # before there is an event
    assert server.idle(20)
    assert server.served.engine.counts.generated_tokens - before < 16 * 450
    assert call(server, "/v1/completions", TEXT)[0] == 200


def test_a_mixture_of_clients_leaves_nothing_behind_and_no_wrong_text(folder):
    """`python -m benchmarks soak` is the same for as long as you like."""
    from amoeba.serve.server import Limits
    from benchmarks.soak import KINDS, Target, soak

    with running(folder, limits=Limits(queue=3, body=20_000, body_seconds=0.2), api_key="secret", slots=2) as server:
        kinds = {kind: share for kind, share in KINDS.items() if kind != "never reads"}  # which takes seconds
        found = soak(Target(server.port, NAME, 20_000, "secret"), 1.0, len(kinds), kinds)
        assert found.wrong == [] and found.stuck == {}
        assert found.statuses.keys() == kinds.keys() and any(counts[200] for counts in found.statuses.values())


def test_sigterm_finishes_answers_that_have_begun_and_refuses_new_ones(folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        until = time.monotonic() + 60
        while connection.sock is None and time.monotonic() < until:
            with suppress(OSError):
                connection.connect()
            time.sleep(0.02)
        try:
            connection.request("POST", "/v1/completions", json.dumps(TEXT | {"max_tokens": 400, "stream": True}))
            response = connection.getresponse()
            found.append(response.readline())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(response.read())
        try:
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
        except OSError:
            found.append("refused")

    asking = threading.Thread(target=client, daemon=True)
    asking.start()
    document = command("serve", folder, "--port", port, "--device", "cpu", "--json").document
    asking.join(60)
    first, rest, after = found
    assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n") and after == "refused"
    assert b'"finish_reason": "length"' in rest or b'"finish_reason": "stop"' in rest
    assert document["document"] == "amoeba serve" and document["generated_tokens"] > 10


def test_streamed_experts_give_the_same_text_and_tell_their_hit_rate(folder, server):
    from amoeba.jobs.generate.options import GenerationOptions

    options = GenerationOptions(max_new_tokens=40, ram="auto")
    with running(folder, options=options) as streamed:
        bodies = [TEXT | {"prompt": "Once " * (number + 1), "max_tokens": 12} for number in range(5)]
        found: dict[int, dict] = {}

        def ask(number: int) -> None:
            found[number] = call(streamed, "/v1/completions", bodies[number])[1]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, body in enumerate(bodies):
            assert found[number]["choices"] == call(server, "/v1/completions", body)[1]["choices"]
        cache = call(streamed, "/status", method="GET")[1]["expert_cache"]
        assert cache["requested"] > 0 and 0 < cache["hit_rate"] <= 1
        assert "amoeba_experts_hit_total" in call(streamed, "/metrics", method="GET")[1]


def test_an_unread_answer_counts_until_it_is_generated(server):
    from amoeba.serve.protocol import CompletionBody
    from amoeba.serve.server import Answer

    body = CompletionBody.model_validate(TEXT)

    async def begin() -> int:
        answer = Answer(server.server, body, [[5, 6]], 4, None)
        server.server.open += 1
        answer.submit(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(20):
                while server.server.open:
                    await asyncio.sleep(0.01)
        finally:
            answer.close()
        return server.server.open

    assert asyncio.run(begin()) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "999.1.1.1"])
def test_an_address_that_cannot_be_taken_is_refused_before_the_model_is_loaded(folder, monkeypatch, host):
    monkeypatch.setattr("amoeba.serve.served_model.open_model", lambda *_, **__: pytest.fail("it was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = command("serve", folder, "--host", host, "--port", port, "--device", "cpu", code=2)
    assert f"expected an address that is free here; got {host} and {port}" in ended.said


def test_an_adapter_that_is_merged_into_the_model_is_refused(folder, adapters, tmp_path):
    from amoeba.jobs.convert.merge import merge

    merge(folder, adapters["first"], tmp_path / "merged")
    words = ("--adapter", f"mine={adapters['first']}", "--device", "cpu", "--port", 0)
    assert "which is already merged into" in command("serve", tmp_path / "merged", *words, code=2).said
