"""A page in a real, headless Chromium: opened, moved, read and photographed. Nothing to install but the browser.

    with Chromium(folder) as chromium:
        chromium.open(path.as_uri(), width=1200)
        chromium.evaluate("document.title")
        chromium.problems      # console errors, uncaught exceptions, refused loads

The DevTools protocol over --remote-debugging-pipe: JSON messages that end in a zero byte, read by the browser from
file descriptor 3 and written to 4.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
OPTIONS += ("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars")
_SECONDS = 60.0
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name, path="/usr/bin:" + os.environ["PATH"]))), None)


class Chromium:
    def __init__(self, folder: Path) -> None:
        """`folder` gets the browser's profile and what it prints."""
        executable = find_chromium()
        assert executable is not None
        # Numbers above 4, or the browser's ends would be overwritten while they are put in place
        its_input, self._write = (_above_4(end) for end in os.pipe())
        self._read, its_output = (_above_4(end) for end in os.pipe())
        options = [*OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        with open(folder / "chromium.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _LAUNCH, str(its_input), str(its_output), executable, *options],
                pass_fds=(its_input, its_output),
                stdout=log,
                stderr=log,
            )
        os.close(its_input)
        os.close(its_output)
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._loaded = False
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Chromium:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def open(self, address: str, width: int, height: int = 900, scheme: str = "light") -> None:
        """Waits until the page is loaded. What went wrong on the page before is forgotten."""
        self.problems.clear()
        self.requests.clear()
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._receive(time.monotonic() + _SECONDS)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium said nothing for {_SECONDS:.0f} s")
            found = os.read(self._read, 1 << 20)
            if not found:
                raise ConnectionError(f"Chromium ended with {self._process.wait()}")
            self._received += found
        line, _, rest = self._received.partition(b"\0")
        self._received = rest
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {parameters['args']}")
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])


def _above_4(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
