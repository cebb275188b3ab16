"""Headless Chromium, driven by its DevTools protocol over a pipe: it listens nowhere."""

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
SECONDS = 60.0


class Browser:
    """Commands and their answers; events are kept until a page asks for them."""

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
        """Its value. A promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, condition: str) -> Self:
        """Until the expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"not true in time: {condition}; the page says: {self.text}"
            time.sleep(0.05)
        return self

    @property
    def text(self) -> str:
        return self.run("document.body.innerText")

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console so far, exceptions included."""
        self.run("1")
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        logs = [event["params"]["entry"] for event in own if event["method"] == "Log.entryAdded"]
        calls = [event["params"] for event in own if event["method"] == "Runtime.consoleAPICalled"]
        raised = [event["params"] for event in own if event["method"] == "Runtime.exceptionThrown"]
        return [
            *(each["text"] for each in logs if each["level"] in ("error", "warning")),
            *(str(each["args"]) for each in calls if each["type"] in ("error", "warning", "assert")),
            *(str(each["exceptionDetails"]) for each in raised),
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
        found = Browser(from_us, from_child)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
