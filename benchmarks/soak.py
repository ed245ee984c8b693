"""`python -m benchmarks soak --minutes 10`: a server under clients that behave, leave, send nonsense, or are slow.

    found = soak(Target(port, "tiny", body=20_000), seconds=600, clients=16)
    found.statuses          # of each kind of client: how often each status came
    found.wrong             # what should not have happened, in words

Clients that behave ask for texts that were generated alone before, greedy and sampled, and compare every character.
`run` starts `amoeba serve` with small limits, samples its memory, and ends it with SIGTERM while answers are on their
way: these have to be finished.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amoeba.commands.output import Output
from benchmarks.serve import SIZES, save_model, started

_KEY, _BODY, _TOKENS, _SEEDS = "secret", 20_000, 40, 6
_MOST_GROWN = 0.02  # of resident memory, from the second quarter of the run to the last
# How often each kind of client comes
KINDS = {
    "whole": 6, "stream": 4, "chat": 3, "slow reader": 2, "leaves": 5, "malformed": 2, "wrong value": 2,
    "too long": 1, "unknown model": 1, "no key": 1, "oversized": 1, "slow body": 0.05, "never reads": 0.1,
}  # fmt: skip
_EXPECTED = {
    "malformed": {422}, "wrong value": {422, 429}, "too long": {422, 429}, "unknown model": {404}, "no key": {401},
    "oversized": {413}, "slow body": {408},
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """body: bytes that the server takes at most. key: that it wants, or None."""

    port: int
    model: str
    body: int = 4 * 2**20
    key: str | None = None


@dataclass
class Found:
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # resident bytes of the server, at equal distances
    stuck: dict[str, int] = field(default_factory=dict)  # what is left when all clients are gone
    finished_at_sigterm: int = 0
    exit_code: int | None = None

    @property
    def grown(self) -> float:
        """Of the server's memory, from the second quarter to the last."""
        quarter = len(self.memory) // 4
        if not quarter:
            return 0.0
        before, after = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return statistics.median(after) / statistics.median(before) - 1


def call(target: Target, path: str, body: Any = None, key: str | None = "right") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {target.key if key == 'right' else key}"} if target.key and key else {}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", target.port, timeout=120)) as connection:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text.startswith(b"{") else text


def soak(target: Target, seconds: float, clients: int, kinds: dict[str, float] = KINDS) -> Found:
    """Threads with one client after another, until the time is over."""
    found = Found()
    bodies = [_body(target, seed) for seed in range(_SEEDS)]
    texts = [call(target, "/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    said = [{"role": "user", "content": "Once"}]
    chat = {**{name: value for name, value in bodies[1].items() if name != "prompt"}, "messages": said, "n": 2}
    answers = [choice["message"]["content"] for choice in call(target, "/v1/chat/completions", chat)[1]["choices"]]
    until = time.monotonic() + seconds

    def wrong(kind: str, what: object) -> None:
        found.wrong.append(f"{kind}: {str(what)[:200]}")

    def one(kind: str, chance: random.Random) -> None:
        seed = chance.randrange(_SEEDS)
        body = bodies[seed]
        status, got, expected = 200, None, None
        if kind == "whole":
            status, document = call(target, "/v1/completions", body)
            got, expected = document.get("choices", [{}])[0].get("text"), texts[seed]
        elif kind in ("stream", "slow reader"):
            status, got = _streamed(target, body, 0.01 if kind == "slow reader" else 0.0)
            expected = texts[seed]
        elif kind == "chat":
            status, document = call(target, "/v1/chat/completions", chat | {"logprobs": True})
            got, expected = [each["message"]["content"] for each in document.get("choices", ())], answers
        elif kind == "leaves":
            _leave(
                target, body | {"max_tokens": 400, "stream": chance.random() < 0.5}, chance.choice((0, 0, 100, 2000))
            )
        elif kind == "never reads":
            _leave(target, body | {"max_tokens": 400, "stream": True}, 0, wait=5)
        elif kind == "slow body":
            status = _raw(target, b"Content-Length: 50\r\n\r\n{", wait=60)
        elif kind == "oversized":
            if chance.random() < 0.5:
                status = call(target, "/v1/completions", b" " * (target.body + 1))[0]
            else:  # without a length
                part = b"1000\r\n" + b" " * 4096 + b"\r\n"
                status = _raw(target, b"Transfer-Encoding: chunked\r\n\r\n" + part * (target.body // 4096 + 1), wait=60)
        else:
            bad: Any = {
                "malformed": chance.choice((b"{", b"[]", b"\xff\xfe", b"null")),
                "wrong value": body | chance.choice(({"temperature": -1}, {"n": 99}, {"stop": [""]}, {"echo": True})),
                "too long": body | {"prompt": [5] * 6000},
                "unknown model": body | {"model": "another"},
                "no key": body,
            }[kind]
            status = call(target, "/v1/completions", bad, None if kind == "no key" else "right")[0]
        found.statuses.setdefault(kind, Counter())[status] += 1
        if status not in _EXPECTED.get(kind, {200, 429}):
            wrong(kind, f"status {status}")
        elif status == 200 and got != expected:
            wrong(kind, f"expected {expected!r}; got {got!r}")

    def client(number: int) -> None:
        chance = random.Random(number)
        names = [name for name in kinds if target.key or name != "no key"]
        kind = names[number % len(names)]  # with enough clients each kind comes, however slow the machine
        while time.monotonic() < until:
            try:
                one(kind, chance)
            except Exception as error:  # a connection that breaks is wrong, too
                wrong(kind, repr(error))
            kind = chance.choices(names, [kinds[name] for name in names])[0]

    _all([lambda number=number: client(number) for number in range(clients)])  # type: ignore[misc]
    found.stuck = _left(target)
    return found


def _body(target: Target, seed: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"temperature": 0} if not seed else {"temperature": 0.5 + 0.3 * seed, "seed": seed}
    return {"model": target.model, "prompt": "Once upon " * (1 + 3 * seed), "max_tokens": _TOKENS, **settings}


def _streamed(target: Target, body: dict[str, Any], pause: float) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {target.key}"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", target.port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        response, text, last = connection.getresponse(), "", b""
        for line in response:
            time.sleep(pause)
            last = line.strip() or last
            if line.startswith(b"data: {"):
                text += (json.loads(line[6:]).get("choices") or [{"text": "(no choices)"}])[0]["text"]
        return response.status, text if last == b"data: [DONE]" else f"{text} (no end)"


def _leave(target: Target, body: dict[str, Any], after: int, wait: float = 0.0) -> None:
    """Closes the connection after this many bytes of the answer."""
    data = json.dumps(body).encode()
    with _connected(target) as raw:
        raw.sendall(_head(target) + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(wait)
        while after > 0 and (part := raw.recv(after)):
            after -= len(part)


def _raw(target: Target, rest: bytes, wait: float) -> int:
    with _connected(target) as raw:
        raw.settimeout(wait)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            raw.sendall(_head(target) + rest)
        return int(raw.recv(4096).split()[1])


def _connected(target: Target) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.port), timeout=120)


def _head(target: Target) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {target.key}\r\n".encode()


def _left(target: Target, seconds: float = 20.0) -> dict[str, int]:
    until = time.monotonic() + seconds
    while True:
        status = call(target, "/status")[1]
        left = {name: status[name] for name in ("active", "waiting", "open") if status[name]}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(minutes: float, clients: int, path: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(SIZES["tiny"], folder, torch.device("cpu"))
        words = [sys.executable, "-m", "amoeba", "serve", str(folder), "--name", "served", "--device", "cpu"]
        words += ["--api-key", _KEY, "--max-body", str(_BODY), "--queue", "6", "--slots", "4", "--context", "500"]
        with started(words, folder) as (process, port):
            target, memory, over = Target(port, "served", _BODY, _KEY), list[int](), threading.Event()

            def watch() -> None:
                while not over.wait(0.5 * minutes):  # 120 times
                    memory.append(_resident(process.pid))

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                found = soak(target, 60 * minutes, clients)
            finally:
                over.set()
                watcher.join()
            found.memory = memory
            _end_under_load(target, found, lambda: process.send_signal(signal.SIGTERM))
            found.exit_code = process.wait(60)
    rows = [[kind, ", ".join(f"{n} x {s}" for s, n in sorted(each.items()))] for kind, each in found.statuses.items()]
    output.table(f"{minutes:g} minutes, {clients} clients at once", ["client", "statuses"], rows, text=("statuses",))
    low, high = (f"{f(found.memory or [0]) / 2**20:.0f}" for f in (min, max))
    output.facts(
        [
            ("memory", f"{low} to {high} MiB, {100 * found.grown:+.1f} % from the second quarter to the last"),
            ("left behind", str(found.stuck or "nothing")),
            ("at SIGTERM", f"{found.finished_at_sigterm} answers finished, exit code {found.exit_code}"),
            ("wrong", "nothing" if not found.wrong else f"{len(found.wrong)} times; {found.wrong[0]}"),
        ]
    )
    document = {
        "document": "benchmarks soak",
        "minutes": minutes,
        "clients": clients,
        **vars(found),
        "grown": found.grown,
    }
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
    right = not found.wrong and not found.stuck and found.exit_code == 0 and found.grown <= _MOST_GROWN
    return document, right


def _end_under_load(target: Target, found: Found, end: Callable[[], None]) -> None:
    """Streams that have begun when the signal comes have to arrive whole."""
    alone = _streamed(target, _body(target, 1) | {"max_tokens": 300}, 0)[1]
    begun = threading.Barrier(5)

    def ask() -> None:
        body = _body(target, 1) | {"max_tokens": 300, "stream": True}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", target.port, timeout=120)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {target.key}"})
            response = connection.getresponse()
            first = response.readline()
            begun.wait(60)
            lines = [first, *response]
        parts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {")]
        if "".join(parts) == alone and b"data: [DONE]\n" in lines:
            found.finished_at_sigterm += 1
        else:
            found.wrong.append(f"SIGTERM: an answer ended after {len(parts)} parts")

    def stop() -> None:
        begun.wait(60)
        end()

    _all([ask] * 4 + [stop])


def _resident(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    return 0
