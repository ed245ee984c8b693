"""The HTTP server: OpenAI's endpoints over a `ServedModel`, with limits, metrics and a page to try it.

    app = make_app(served, Limits(queue=64), api_key=None)
    run(app, served, bound("127.0.0.1", 8000), ready)      # until SIGTERM or Ctrl-C; finishes answers that have begun

/v1/chat/completions, /v1/completions and /v1/models are OpenAI's. /health says whether requests can be answered,
/metrics is for Prometheus, /status is what the page at / shows. With an API key, /v1 and /status need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from amoeba._version import __version__
from amoeba.core.errors import bad_value
from amoeba.decoding import engine
from amoeba.decoding.engine import End, Token
from amoeba.serve.answer import ChoiceText, Logprob
from amoeba.serve.protocol import About, ChatBody, CompletionBody, Refused, usage
from amoeba.serve.served_model import ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/status", "/")
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions


@dataclass(frozen=True)
class Limits:
    """queue: answers that wait for a row, before 429. body: bytes, before 413. body_seconds: until a body has arrived,
    before 408."""

    queue: int = 64
    body: int = 4 * 2**20
    body_seconds: float = 30.0


def make_app(served: ServedModel, limits: Limits, api_key: str | None = None, plan: str | None = None) -> FastAPI:
    """plan: what the plan chose, in words, for the page."""
    app = FastAPI(title="aMoEba", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    server = Server(served, limits, api_key)
    app.state.server = server

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error.document(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def not_there(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(Refused(error.status_code, str(error.detail)).document(), error.status_code)

    app.add_middleware(Counted, requests=server.metrics.requests)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await server.body_of(request, ChatBody)
        return await server.answer(request, body, 1)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await server.body_of(request, CompletionBody)
        return await server.answer(request, body, len(body.prompts))

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        server.check_key(request)
        return {"object": "list", "data": [server.model(name) for name in served.names]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        server.check_key(request)
        server.check_model(name)
        return server.model(name)

    @app.get("/health")
    async def health() -> JSONResponse:
        why = "the server is stopping" if server.stopping else served.why_ill()
        return JSONResponse({"status": "ok"} if why is None else {"status": why}, 200 if why is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(server.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        server.check_key(request)
        return served.status() | {"open": server.open, "plan": plan}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return files("amoeba.serve").joinpath("page.html").read_text(encoding="utf-8")

    return app


class Counted:
    """Counts requests by path and status; paths that are not served are one."""

    def __init__(self, app: Any, requests: Counter) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self._requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


class Metrics:
    def __init__(self, served: ServedModel) -> None:
        self.registry = CollectorRegistry()
        about: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("amoeba_requests", "HTTP requests.", ["path", "status"], **about)
        self.answers = Counter("amoeba_answers", "Answers, by the reason that ended them.", ["reason"], **about)
        self.first_token = Histogram("amoeba_first_token_seconds", "To the first token.", buckets=_SECONDS, **about)
        self.seconds = Histogram("amoeba_answer_seconds", "To the last token.", buckets=_SECONDS, **about)
        self._served = served
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        status = self._served.status()
        for name, about in (
            ("prompt_tokens", "Tokens of prompts."),
            ("shared_prompt_tokens", "Of these, tokens that an earlier text had in common."),
            ("generated_tokens", "Tokens of answers."),
        ):
            yield CounterMetricFamily(f"amoeba_{name}", about, value=status[name])
        for name, about in (
            ("active", "Answers that are being generated."),
            ("waiting", "Answers that wait for a row."),
            ("slots", "Rows of a batch."),
        ):
            yield GaugeMetricFamily(f"amoeba_{name}", about, value=status[name])
        if (cache := status["expert_cache"]) is not None:
            yield CounterMetricFamily("amoeba_experts_requested", "Experts that steps need.", value=cache["requested"])
            yield CounterMetricFamily("amoeba_experts_hit", "Of these, experts that were there.", value=cache["hits"])


class Server:
    def __init__(self, served: ServedModel, limits: Limits, api_key: str | None) -> None:
        self.served, self.limits, self._key = served, limits, api_key
        self.metrics = Metrics(served)
        self.stopping = False
        self.open = 0  # answers that wait or are generated

    def check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            message = "expected the header Authorization: Bearer with this server's API key"
            raise Refused(401, message, code="invalid_api_key")

    def check_model(self, name: str) -> None:
        if name not in self.served.names:
            message = f"model: expected one of {', '.join(self.served.names)}; got {name[:200]}"
            raise Refused(404, message, "model", "model_not_found")

    def model(self, name: str) -> dict[str, Any]:
        first = self.served.names[0]
        found = {"id": name, "object": "model", "created": int(self.served.began), "owned_by": "amoeba"}
        return found | {"max_model_len": self.served.context} | ({} if name == first else {"parent": first})

    async def body_of(self, request: Request, kind: type[Any]) -> Any:
        self.check_key(request)
        data = await self._read(request)
        try:
            body = kind.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(each) for each in first["loc"]) or "body"
            raise Refused(422, f"{place}: {first['msg']}", place) from None
        body.check()
        self.check_model(body.model)
        if self.stopping or (why := self.served.why_ill()) is not None:
            raise Refused(503, "the server is stopping" if self.stopping else f"the engine has failed: {why}")
        return body

    async def _read(self, request: Request) -> bytes:
        most = self.limits.body
        too_long = Refused(413, f"expected a body of at most {most} bytes. Send less, or raise --max-body", "body")
        length = request.headers.get("content-length", "0")
        is_too_long = length.isdecimal() and int(length) > most
        if is_too_long and "expect" in request.headers:  # such a client waits before it sends
            raise too_long
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():  # to its end: a client that is still sending sees no answer
                    is_too_long = is_too_long or len(data) + len(part) > most
                    data += b"" if is_too_long else part
        except TimeoutError:
            if is_too_long:
                raise too_long from None
            seconds = f"{self.limits.body_seconds:g} seconds"
            raise Refused(408, f"expected the whole body within {seconds}. Send it at once", "body") from None
        if is_too_long:
            raise too_long
        return bytes(data)

    def chat_prompt(self, body: ChatBody) -> tuple[list[list[int]], int | None, Any]:
        with _in_words():
            messages = [message.for_template() for message in body.messages]
            ids = self.served.chat_ids(body.model, messages, body.offered_tools, body.chat_template_kwargs)
            return [ids], body.max_completion_tokens or body.max_tokens, body.response_format

    def text_prompts(self, body: CompletionBody) -> tuple[list[list[int]], int | None, Any]:
        with _in_words():
            prompts = [self.served.text_ids(body.model, prompt) for prompt in body.prompts]
            return prompts, body.max_tokens or DEFAULT_COMPLETION_TOKENS, body.response_format

    def _prepared(self, body: ChatBody | CompletionBody) -> Answer:
        return Answer(self, body, *(self.chat_prompt(body) if isinstance(body, ChatBody) else self.text_prompts(body)))

    async def answer(self, request: Request, body: ChatBody | CompletionBody, prompts: int) -> Response:
        count = prompts * body.n
        room = self.served.engine.slots * len(self.served.names) + self.limits.queue
        if self.open + count > room:
            raise Refused(429, f"expected at most {room} answers at once. Try again later", code="queue_full")
        self.open += count  # before anything is waited for
        try:
            answer = await run_in_threadpool(self._prepared, body)
        except BaseException:
            self.open -= count
            raise
        answer.submit(asyncio.get_running_loop())
        if body.stream:
            return StreamingResponse(answer.events(), media_type="text/event-stream", headers=_NOT_KEPT)
        left = asyncio.create_task(_until_left(request))
        whole = asyncio.create_task(answer.whole())
        try:
            await asyncio.wait({left, whole}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return Response(status_code=499)  # to a client that is not there
            return JSONResponse(whole.result())
        finally:
            left.cancel()
            if not whole.done():
                whole.cancel()
            answer.close()

    def ended(self, choices: int) -> None:
        self.open -= choices


_NOT_KEPT = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """A bad value, which has a sentence of its own, is the client's."""
    try:
        yield
    except ValueError as error:
        raise Refused(422, str(error), str(error).partition(":")[0]) from None


class Answer:
    def __init__(
        self, server: Server, body: ChatBody | CompletionBody, prompts: list[list[int]], most: int | None, format: Any
    ) -> None:
        served, self._server, self._body = server.served, server, body
        self._chat = isinstance(body, ChatBody)
        self._about = About.new(self._chat, body.model)
        self._prompt_tokens = sum(map(len, prompts))
        self._told: asyncio.Queue[tuple[int, Token | End]] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began, self._first, self._closed = time.perf_counter(), False, False
        calls_tools = isinstance(body, ChatBody) and body.offered_tools is not None
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        with _in_words():
            sampling = served.sampling(**{name: getattr(body, name) for name in names})
        self._texts: list[ChoiceText] = []
        self._requests: list[engine.Request] = []
        for ids in prompts:
            seed = served.seed(body.seed)
            for number in range(body.n):
                hear = functools.partial(self._hear, len(self._texts))
                self._texts.append(ChoiceText(served.tokenizers[body.model], body.stops, calls_tools))
                told: dict[str, Any] = {"lane": body.model, "logprobs": body.wanted_logprobs}
                told |= {"grammar": served.grammars[body.model].of(format)}
                chosen = served.most(ids, most), hear, sampling, (seed + number) % 2**63, served.ends
                self._requests.append(engine.Request(ids, *chosen, **told))

    def submit(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._unended = loop, len(self._requests)
        for request in self._requests:
            self._server.served.engine.submit(request)

    def close(self) -> None:
        """What is not finished is not needed any more."""
        if self._closed:
            return
        self._closed = True
        self._server.ended(self._unended)
        for request in self._requests:
            request.cancel()
        self._server.served.engine.wake()

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Logprob]] = [[] for _ in self._texts]
        reasons: dict[int, str] = {}
        async for index, _, logprobs, reason in self._parts():
            pieces[index] += logprobs
            if reason is not None:
                reasons[index] = reason
        choices = []
        for index, text in enumerate(self._texts):
            choice: dict[str, Any] = {"index": index, "finish_reason": reasons[index]}
            choice["logprobs"] = self._logprobs(pieces[index])
            if self._chat:
                calls = {"tool_calls": text.tool_calls} if text.tool_calls else {}
                content = None if calls and not text.text else text.text
                choice["message"] = {"role": "assistant", "content": content, **calls}
            else:
                choice["text"] = text.text
            choices.append(choice)
        return self._about.document(choices, self._usage(), chunk=False)

    async def events(self) -> AsyncIterator[str]:
        try:
            if self._chat:
                for index in range(len(self._texts)):
                    yield self._event(index, {"role": "assistant", "content": ""}, [], None)
            async for index, text, logprobs, reason in self._parts():
                if text or logprobs:
                    yield self._event(index, {"content": text} if self._chat else text, logprobs, None)
                if reason is not None:
                    for number, call in enumerate(self._texts[index].tool_calls):
                        yield self._event(index, {"tool_calls": [{"index": number, **call}]}, [], None)
                    yield self._event(index, {} if self._chat else "", [], reason)
            if self._body.includes_usage:
                yield _sse(self._about.document([], self._usage(), chunk=True))
            yield "data: [DONE]\n\n"
        except Refused as error:
            yield _sse(error.document())
        finally:
            self.close()

    def _hear(self, index: int, told: Token | End) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left
            self._loop.call_soon_threadsafe(self._take, index, told)

    def _take(self, index: int, told: Token | End) -> None:
        if isinstance(told, End) and not self._closed:  # also where the client does not read what it is sent
            self._unended -= 1
            self._server.ended(1)
        self._told.put_nowait((index, told))

    async def _parts(self) -> AsyncIterator[tuple[int, str, list[Logprob], str | None]]:
        metrics, left = self._server.metrics, set(range(len(self._texts)))
        ends = self._server.served.ends
        while left:
            index, told = await self._told.get()
            text = self._texts[index]
            if index not in left:
                continue
            if isinstance(told, Token):
                if not self._first:
                    self._first = True
                    metrics.first_token.observe(time.perf_counter() - self._began)
                piece = text.add(told)
                if not text.stopped:
                    if told.id not in ends or piece.text:
                        yield index, piece.text, piece.logprobs, None
                    continue
                self._requests[index].cancel()  # and what it has chosen meanwhile is dropped
                reason = "stop"
                yield index, piece.text, piece.logprobs, None
            elif told.reason in ("error", "cancelled"):
                raise Refused(500, told.error or "the answer was cancelled")
            else:
                reason = told.reason
            last = text.end()
            left.discard(index)
            metrics.answers.labels(reason).inc()
            yield index, last.text, last.logprobs, "tool_calls" if text.tool_calls else reason
        metrics.seconds.observe(time.perf_counter() - self._began)

    def _event(self, index: int, delta: dict[str, Any] | str, logprobs: list[Logprob], reason: str | None) -> str:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": self._logprobs(logprobs)}
        choice["delta" if self._chat else "text"] = delta
        return _sse(self._about.document([choice], None, chunk=True))

    def _logprobs(self, found: list[Logprob]) -> dict[str, Any] | None:
        if self._body.wanted_logprobs is None or not found:
            return None
        if self._chat:
            return {"content": [each.as_chat() for each in found]}
        return {
            "tokens": [each.token for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [dict(each.top) | {each.token: each.logprob} for each in found],
            "text_offset": [each.offset for each in found],
        }

    def _usage(self) -> dict[str, Any]:
        shared = sum(request.shared for request in self._requests)
        return usage(self._prompt_tokens, sum(text.tokens for text in self._texts), min(shared, self._prompt_tokens))


def _sse(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


class _Uvicorn(uvicorn.Server):
    """Ends in order at a signal, and leaves the signal at that: the command has more to do then."""

    def __init__(self, config: uvicorn.Config, at_signal: Callable[[], None], ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._at_signal, self._ready = at_signal, ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._at_signal()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def bound(host: str, port: int) -> socket.socket:
    """The address, taken before a model is loaded; nothing is accepted until the server runs."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        got = f"{host} and {port} ({error.strerror})"
        raise bad_value("--host and --port", "an address that is free here", got, "choose another port") from None
    return taken


def run(app: FastAPI, served: ServedModel, address: socket.socket, ready: Callable[[int], object]) -> None:
    """ready: is told the port when connections are accepted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=30, lifespan="off")

    def at_signal() -> None:
        app.state.server.stopping = True

    server = _Uvicorn(config, at_signal, lambda: ready(address.getsockname()[1]))
    server.run(sockets=[address])
    served.stop(10)
