"""`python -m benchmarks serve`: both engines answer concurrent clients, and every token is counted."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from benchmarks import serve
from benchmarks.serve import SIZES, ServeMeasurement, ServeReport, _slow, load_test, run_serve
from selection import quick

SMALL = replace(SIZES["tiny"], new_tokens=4, answers=2)


@quick(lambda names: "transformers" not in names)  # whose batches wait for each other here: 20 s
@pytest.mark.parametrize("names", [("amoeba", "amoeba generate"), ("amoeba", "amoeba generate", "transformers")])
def test_clients_in_one_process_get_all_of_their_tokens(names, monkeypatch):
    every = serve._in_process
    monkeypatch.setattr(serve, "_in_process", lambda *given: [each for each in every(*given) if each[0] in names])
    report = run_serve(SMALL, [1, 3], torch.device("cpu"), over_http=False)
    ours = [each for each in report.measurements if each.name == "amoeba"]
    assert [(each.clients, each.tokens) for each in ours] == [(1, 8), (3, 24)]
    assert all(len(each.first_token_seconds) == 2 * each.clients for each in ours)
    assert all(0 < each.first(0.5) <= each.first(0.99) < each.seconds for each in ours)
    assert report.of("amoeba generate", 1).tokens == 8


def test_a_client_that_fails_fails_the_measurement():
    with pytest.raises(ZeroDivisionError):
        load_test("broken", 2, 1, lambda number, first: 1 // 0)


def test_a_gpu_has_to_be_twice_as_fast_with_eight_clients():
    def report(ours: int, device: str = "cuda") -> ServeReport:
        pairs = (("transformers", 100), ("amoeba", ours))
        found = [ServeMeasurement(name, 8, tokens, 1.0, [0.1]) for name, tokens in pairs]
        return ServeReport(SMALL, device, False, found)

    assert _slow(report(199)) and not _slow(report(200)) and not _slow(report(100, "cpu"))


def test_the_prompt_that_a_server_streams_back_is_no_first_token():
    texts = ["", "a prompt", "first", " second"]
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts] + [{"usage": {"completion_tokens": 7}}]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks))

    calls: list[None] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert serve._ask(server.server_port, "served", "a prompt", 7, lambda: calls.append(None)) == 7
    assert len(calls) == 2
