"""A headless Chromium, driven over a pipe with the DevTools protocol: nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

REQUIRED_VARIABLE = "FLASHWRIGHT_REQUIRE_BROWSER"
"""Set where a browser must be there, so that its absence is a failure and not a reason to skip."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60


def find_browser() -> str | None:
    """A Chromium on the PATH, or one that Playwright installed."""
    on_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if on_path is not None:
        return on_path
    of_playwright = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    return str(of_playwright[-1]) if of_playwright else None


class Page:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._last_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next_message(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser gave no answer within {ANSWER_SECONDS} s"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def open(self, file: Path, *, width: int, colour_scheme: str = "light") -> None:
        """Load a file in a window of that width, and wait until it stands."""
        self.events.clear()
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colour_scheme}])
        self.command("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next_message())

    def evaluate(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.command("Page.printToPDF", printBackground=False)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the page was opened."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]

    def requests(self) -> list[str]:
        """What the page asked for, itself included."""
        sent = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]


@contextmanager
def open_page(browser: str) -> Iterator[Page]:
    """A tab in a browser of its own, which ends with the block."""
    to_read, to_write = _pipe_above_the_standard_ones()
    from_read, from_write = _pipe_above_the_standard_ones()

    def connect() -> None:
        os.dup2(to_read, 3)
        os.dup2(from_write, 4)

    # Chromium's own children may outlive it by a moment, and still write to the profile.
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser, *FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            process.terminate()
            process.wait(timeout=30)
            os.close(to_write)
            os.close(from_read)


def _pipe_above_the_standard_ones() -> tuple[int, int]:
    """A pipe whose ends are none of the descriptors 0 to 4, which the browser's will be."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
