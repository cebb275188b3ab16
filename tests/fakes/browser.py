"""Headless Chromium, driven by its DevTools protocol over a pipe, so that it opens no port."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio")
WAIT_SECONDS = 60.0


class Browser:
    """Sends commands and returns their results. Events are stored until a page looks for them."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._partial = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def page(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._partial:
            data = self._read.read(1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._partial += data
        message, _, self._partial = self._partial.partition(b"\0")
        return json.loads(message)


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value. A promise is awaited."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"])
        return reply["result"].get("value")

    def wait(self, condition: str) -> Self:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"not true in time: {condition}; the page says: {self.text}"
            time.sleep(0.05)
        return self

    @property
    def text(self) -> str:
        return self.run("document.body.innerText")

    @property
    def console_errors(self) -> list[str]:
        """Errors and warnings in the console so far, including uncaught exceptions."""
        # A round trip: events that the browser sent before its reply have then been read.
        self.run("1")
        events = [event for event in self._browser.events if event.get("sessionId") == self._session]
        logs = [event["params"]["entry"] for event in events if event["method"] == "Log.entryAdded"]
        calls = [event["params"] for event in events if event["method"] == "Runtime.consoleAPICalled"]
        raised = [event["params"] for event in events if event["method"] == "Runtime.exceptionThrown"]
        return [
            *(entry["text"] for entry in logs if entry["level"] in ("error", "warning")),
            *(str(call["args"]) for call in calls if call["type"] in ("error", "warning", "assert")),
            *(str(exception["exceptionDetails"]) for exception in raised),
        ]

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        to_child, from_us = os.pipe()
        from_child, to_us = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        command = f'exec "$0" "$@" 3<&{to_child} 4>&{to_us}'
        arguments = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", command, *arguments], pass_fds=(to_child, to_us), stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(to_us)
        started = Browser(from_us, from_child)
        try:
            yield started
        finally:
            process.kill()
            process.wait()
