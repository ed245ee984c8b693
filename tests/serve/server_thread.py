"""A server in a thread of the tests' own process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("fastapi", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'amoeba-moe[serve]'")

import uvicorn  # noqa: E402

from amoeba.jobs.generate.options import GenerationOptions  # noqa: E402
from amoeba.serve.served_model import ServedModel, open_model  # noqa: E402
from amoeba.serve.server import Limits, _Uvicorn, make_app  # noqa: E402


class Running:
    """A server in a thread."""

    def __init__(self, served: ServedModel, port: int, server: Any) -> None:
        self.served, self.port, self.server = served, port, server
        self.url = f"http://127.0.0.1:{port}"

    def idle(self, seconds: float = 10.0) -> bool:
        """Whether nothing is left to do, soon."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not (self.served.engine.active or self.served.engine.waiting or self.server.open):
                return True
            time.sleep(0.02)
        return False


@contextmanager
def running(
    folder: Path,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    options: Any = None,
    plan: str | None = None,
    **more: Any,
) -> Iterator[Running]:
    options = options or GenerationOptions(max_new_tokens=40, device=torch.device("cpu"))
    with closing(open_model(folder, options, **{"slots": 4, "context": 500} | more)) as served:
        app = make_app(served, limits or Limits(), api_key, plan)
        listening = socket.create_server(("127.0.0.1", 0))
        ready = threading.Event()
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        server = _Uvicorn(config, lambda: None, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert ready.wait(20)
        try:
            yield Running(served, listening.getsockname()[1], app.state.server)
        finally:
            server.should_exit = True
            thread.join(20)
