"""A stream whose engine, detokenizer and router are killed while it runs, one after the other."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from sluice import Client
from sluice.client import Options
from sluice.launch import Ring

PROMPT = "import os\n\ndef copy_tree(source, target):\n"
LINES_BETWEEN = 5
"""Lines of text before each kill."""
PEERS_SECONDS = 10.0
PACE = "examples.survive.pace:pace"
REQUEST = Options(max_tokens=144, seed=2, temperature=0.6, logits_processors=["pace"])


def survive(console: Console) -> bool:
    """Run the demo on `console`. Returns whether the stream's text equals that of an undisturbed request."""
    engine = {"logits_processors": {"pace": PACE}, "threads": 1}
    console.print("starting 1 router, 2 engines, 2 detokenizers …", style="dim", highlight=False)
    with Ring(engines=2, detokenizers=2, engine_args=engine) as ring, Client(ring.address) as client:
        console.print("generating the text undisturbed, to compare with …", style="dim", highlight=False)
        expected = client.generate(PROMPT, **REQUEST).text
        console.print(
            "streaming it again, with kill -9 for each service that works on it:\n", style="dim", highlight=False
        )
        return DisturbedStream(console, ring, client).run(expected)


@dataclass(frozen=True, slots=True)
class Victim:
    role: str
    name: Callable[[Client], str]
    """Returns the name of the service to kill."""


def _busy_engine(client: Client) -> str:
    return _wait_for_first(lambda: (engine.engine_id for engine in client.stats().engines if engine.active_requests))


def _busy_detokenizer(client: Client) -> str:
    return _wait_for_first(
        lambda: (detokenizer.detokenizer_id for detokenizer in client.stats().detokenizers if detokenizer.streams)
    )


def _wait_for_first(names: Callable[[], Iterator[str]]) -> str:
    """Wait until a service reports, twice a second, that it works on the stream. Raises TimeoutError."""
    deadline = time.monotonic() + PEERS_SECONDS
    while time.monotonic() < deadline:
        for name in names():
            return name
        time.sleep(0.05)
    raise TimeoutError("no service reports that it works on the stream")


VICTIMS = (
    Victim("the engine that computes it", _busy_engine),
    Victim("the detokenizer that turns its tokens into text", _busy_detokenizer),
    Victim("the only router", lambda _: "router"),
)


class DisturbedStream:
    """A stream whose services are killed while its text is printed."""

    def __init__(self, console: Console, ring: Ring, client: Client) -> None:
        self._console, self._ring, self._client = console, ring, client
        self._victims = list(VICTIMS)
        self._lines = 0

    def run(self, expected: str) -> bool:
        self._console.print(Text(PROMPT), end="", soft_wrap=True)
        text, longest, last = "", 0.0, time.monotonic()
        with self._client.stream(PROMPT, **REQUEST) as stream:
            for chunk in stream:
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                text += chunk.text
                self._write(chunk.text)
        same = text == expected
        verdict = "the same text as undisturbed" if same else "NOT the text of the undisturbed request"
        killed = len(VICTIMS) - len(self._victims)
        self._console.print(
            f"\n\n{'✔' if same else '✘'} {killed} services killed, {verdict}: {len(text):,} characters, "
            f"longest pause {longest:.1f} s",
            style="bold green" if same else "bold red",
            highlight=False,
        )
        return same and not self._victims

    def _write(self, text: str) -> None:
        """Print text, and kill a service at the end of some lines, so that every run looks the same."""
        for line in text.splitlines(keepends=True):
            self._console.print(Text(line), end="", soft_wrap=True)
            self._lines += line.endswith("\n")
            if line.endswith("\n") and self._victims and self._lines >= LINES_BETWEEN:
                self._lines = 0
                self._kill(self._victims.pop(0))

    def _kill(self, victim: Victim) -> None:
        name = victim.name(self._client)
        os.kill(self._ring.pids[name], signal.SIGKILL)
        self._console.print(f"✘ kill -9 {name}: {victim.role}", style="bold red", highlight=False)
