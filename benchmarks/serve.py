"""`python -m benchmarks serve`: concurrent clients of `amoeba serve`, compared with `transformers serve`.

    report = run_serve(SIZES["tiny"], clients=[1, 8], device=torch.device("cpu"), over_http=True)
    report.of("amoeba serve", 8).tokens_per_second

Every client streams one answer after another, all greedy and of the same length, and the next one begins when the last
has ended. With `over_http` both servers run in processes of their own and the clients are threads of this one. Without
it there is no HTTP: the engine of `amoeba serve` and transformers' continuous batching, which is the engine of
`transformers serve --continuous-batching`, answer in this process. `amoeba generate` is one answer by its captured
steps, without an engine. First tokens are counted from the moment that a request is sent.
transformers serve (5.23) streams the prompt itself before it computes anything; that chunk is not a token.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from benchmarks import command
from benchmarks.random_models import KNOWN, QWEN3_30B, TINY, qwen3_moe

_AT_LEAST = 2.0  # times the throughput of transformers, with 8 clients or more on a GPU


@dataclass(frozen=True)
class ServeSize:
    """words: of a prompt. new_tokens: of an answer. answers: of each client."""

    name: str
    config: dict[str, int]
    words: int
    new_tokens: int
    answers: int
    vocabulary: int | None = None  # None: of the tokenizer


SIZES = {
    "tiny": ServeSize("tiny", TINY, words=12, new_tokens=32, answers=3),
    "qwen3_30b": ServeSize(
        "qwen3_30b", QWEN3_30B | {"num_hidden_layers": 6}, words=60, new_tokens=64, answers=2, vocabulary=151_936
    ),
}


@dataclass
class ServeMeasurement:
    name: str
    clients: int
    tokens: int
    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def first(self, share: float) -> float:
        ordered = sorted(self.first_token_seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class ServeReport:
    size: ServeSize
    device: str
    over_http: bool
    measurements: list[ServeMeasurement] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # by name: why it was not measured

    def of(self, name: str, clients: int) -> ServeMeasurement:
        return next(each for each in self.measurements if (each.name, each.clients) == (name, clients))


# One answer: is told the prompt's number and called back at every token; returns how many there were.
Ask = Callable[[int, Callable[[], None]], int]


class _First:
    """When it was called first."""

    at = 0.0

    def __call__(self) -> None:
        self.at = self.at or time.perf_counter()


def load_test(name: str, clients: int, answers: int, ask: Ask) -> ServeMeasurement:
    """Threads that ask one after another; a failure of one is raised here."""
    first: list[float] = []
    counts: list[int] = []
    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for turn in range(answers):
                began = time.perf_counter()
                seen = _First()
                counts.append(ask(number * answers + turn, seen))
                first.append(seen.at - began)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return ServeMeasurement(name, clients, sum(counts), time.perf_counter() - began, first)


def run_serve(
    size: ServeSize,
    clients: Sequence[int],
    device: torch.device,
    over_http: bool,
    told: Callable[[str], object] = lambda line: None,
    measured: Callable[[ServeReport], object] = lambda report: None,
) -> ServeReport:
    report = ServeReport(size, device.type, over_http)
    with tempfile.TemporaryDirectory() as folder:
        targets = (_by_http if over_http else _in_process)(size, Path(folder), device, max(clients), told)
        for name, open_target in targets:
            told(f"{name}: starting")
            try:
                with open_target() as ask:
                    load_test(name, 1, 1, ask)  # what is compiled and captured
                    for count in clients if name != "amoeba generate" else [1]:
                        if count > 2:
                            load_test(name, count, 1, ask)
                        found = load_test(name, count, size.answers, ask)
                        report.measurements.append(found)
                        told(f"{name}, {count} clients: {found.tokens_per_second:.0f} tokens/s")
                        measured(report)
            except Exception as error:  # a package that is missing, or a refusal
                report.refused[name] = f"{type(error).__name__}: {error}"[:300]
                told(f"{name}: {report.refused[name]}")
    return report


Told = Callable[[str], object]
Targets = list[tuple[str, Callable[[], contextlib.AbstractContextManager[Ask]]]]


def make_model(size: ServeSize, vocabulary: int, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    config = qwen3_moe(size.config, size.vocabulary or vocabulary)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    return model.eval()


def _in_process(
    size: ServeSize, folder: Path, device: torch.device, most: int, told: Callable[[str], object]
) -> Targets:
    model = make_model(size, 300, device)
    own = model.config._experts_implementation  # what transformers takes by itself
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, 300) for _ in range(size.words)] for _ in range(most * (size.answers + 1))]

    @contextlib.contextmanager
    def by_transformers() -> Iterator[Ask]:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=size.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        if own is not None:
            model.set_experts_implementation(own)
        told(f"transformers: experts by {own}")
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        heard: dict[str, Any] = {}
        stop = threading.Event()

        def collect() -> None:
            while not stop.is_set():
                result = manager.get_result(timeout=0.1)
                if result is not None and (receive := heard.get(result.request_id)) is not None:
                    receive(result)

        collector = threading.Thread(target=collect)
        collector.start()
        numbers = iter(range(10**9))

        def ask(number: int, first: Callable[[], None]) -> int:
            name, done, last = f"r{next(numbers)}", threading.Event(), []

            def receive(result: Any) -> None:
                if result.generated_tokens:
                    first()
                if result.is_finished():
                    last.append(result)
                    done.set()

            heard[name] = receive
            manager.add_request(
                prompts[number % len(prompts)], request_id=name, max_new_tokens=size.new_tokens, streaming=True
            )
            if not done.wait(120):
                raise TimeoutError(f"no answer; transformers' manager runs: {manager.is_running()}")
            del heard[name]
            if last[0].error is not None:
                raise RuntimeError(last[0].error)
            return len(last[0].generated_tokens)

        try:
            yield ask
        finally:
            stop.set()
            collector.join()
            manager.stop(block=True)
            gc.collect()

    @contextlib.contextmanager
    def by_engine() -> Iterator[Ask]:
        import amoeba.integrations.transformers as integration
        from amoeba.decoding.engine import End, Engine, Request, Token

        integration.register()
        model.set_experts_implementation("amoeba")
        began = time.perf_counter()
        engine = Engine(model, slots=most, length=size.words + size.new_tokens)
        told(f"engine: {engine.kind}, {engine.reason}; prepared in {time.perf_counter() - began:.1f} s")
        thread = threading.Thread(target=engine.run)
        thread.start()

        def ask(number: int, first: Callable[[], None]) -> int:
            done, ends = threading.Event(), []

            def receive(heard: Token | End) -> None:
                if isinstance(heard, End):
                    ends.append(heard)
                    done.set()
                else:
                    first()

            request = Request(prompts[number % len(prompts)], size.new_tokens, receive)
            engine.submit(request)
            done.wait()
            if ends[0].reason != "length":
                raise RuntimeError(str(ends[0]))
            return request.received

        try:
            yield ask
        finally:
            engine.stop()
            thread.join()

    @contextlib.contextmanager
    def by_decoder() -> Iterator[Ask]:
        import amoeba.integrations.transformers as integration
        from amoeba.decoding.decoder import Decoder, native_steps

        integration.register()
        model.set_experts_implementation("amoeba")
        native = native_steps(model) if device.type == "cpu" else None
        native = None if isinstance(native, str) else native
        decoder = Decoder(model, batch=1, length=size.words + size.new_tokens, native=native)
        decoder.prepare(size.words)

        def ask(number: int, first: Callable[[], None]) -> int:
            count = 0
            for _ in decoder.generate([prompts[number % len(prompts)]], size.new_tokens):
                first()
                count += 1
            return count

        yield ask

    # ours before transformers, which leaves graphs and a large cache behind
    return [("amoeba generate", by_decoder), ("amoeba", by_engine), ("transformers", by_transformers)]


def save_model(size: ServeSize, folder: Path, device: torch.device) -> None:
    """With a tokenizer and a chat template."""
    from amoeba.data.tokenizer import train_tokenizer

    drawn = random.Random(0)
    tokenizer = train_tokenizer([" ".join(drawn.choices(KNOWN, k=40)) for _ in range(900)], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_model(size, len(tokenizer), device).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    gc.collect()


@contextlib.contextmanager
def started(words: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server and its port, once it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w+") as log:
        process = subprocess.Popen([*words, "--port", str(port)], env=environment, stdout=log, stderr=log)
        try:
            _wait_until_healthy(process, port, log)
            yield process, port
        finally:
            process.terminate()
            process.wait(30)


def _by_http(size: ServeSize, folder: Path, device: torch.device, most: int, told: Told) -> Targets:
    save_model(size, folder, device)
    drawn = random.Random(1)
    prompts = [" ".join(drawn.choices(KNOWN, k=size.words)) for _ in range(most * (size.answers + 1))]

    @contextlib.contextmanager
    def served(words: list[str], name: str) -> Iterator[Ask]:
        with started(words, folder) as (_, port):
            yield lambda number, first: _ask(port, name, prompts[number % len(prompts)], size.new_tokens, first)

    python = sys.executable
    ours = [python, "-m", "amoeba", "serve", str(folder), "--device", device.type, "--slots", str(most)]
    theirs = [python, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    theirs += ["--host", "127.0.0.1", "--device", device.type]
    targets: Targets = [("amoeba serve", lambda: served([*ours, "--name", "served"], "served"))]
    targets.append(("transformers serve", lambda: served(theirs, str(folder))))
    if device.type == "cuda":
        batched = [*theirs, "--continuous-batching"]
        targets.append(("transformers serve --continuous-batching", lambda: served(batched, str(folder))))
    return targets


def _wait_until_healthy(process: subprocess.Popen, port: int, log: Any) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-300:]}")


def _ask(port: int, model: str, prompt: str, new_tokens: int, first: Callable[[], None]) -> int:
    """Tokens by the server's own count, where it tells one; else by its chunks."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
    count, told = 0, None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            told = chunk["usage"]["completion_tokens"]
        texts = [(choice.get("delta") or {}).get("content") for choice in chunk.get("choices", ())]
        if any(text not in (None, "", prompt) for text in texts):
            first()
            count += 1
    connection.close()
    return told or count


def run(
    size: ServeSize, clients: Sequence[int], device: torch.device, over_http: bool, path: Path | None, output: Output
) -> tuple[dict[str, Any], bool]:
    """Prints one table; returns the document, and False if a GPU is below the throughput that we promise."""
    how = () if over_http else ("--in-process",)
    measured = BenchRun(command("serve", *how, shape=size.name, device=device.type), "servers", path, output)
    report = run_serve(size, clients, device, over_http, measured.progress, measured.keep)
    measured.keep(report)
    rows = [
        [
            each.name,
            str(each.clients),
            three_digits(each.tokens_per_second),
            three_digits(1000 * statistics.median(each.first_token_seconds)),
            three_digits(1000 * each.first(0.99)),
        ]
        for each in report.measurements
    ]
    title = f"{size.name}, answers of {size.new_tokens} tokens to prompts of {size.words} words, {device.type}"
    output.table(title, ["", "clients", "tokens/s", "first token ms", "p99 ms"], rows)
    for name, reason in report.refused.items():
        output.line(f"  {name} was not measured: {reason}")
    return measured.finish(), not _slow(report)


def _slow(report: ServeReport) -> bool:
    if report.device != "cuda":
        return False
    ours = {each.clients: each.tokens_per_second for each in report.measurements if each.name.startswith("amoeba")}
    theirs = [each for each in report.measurements if each.name.startswith("transformers") and each.clients >= 8]
    return any(ours.get(each.clients, 0.0) < _AT_LEAST * each.tokens_per_second for each in theirs)
