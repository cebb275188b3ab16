"""A detokenizer process, and a router that collects what the process sends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sluice.lanes.inbox import Gap, Inbox
from sluice.wire.heartbeats import DetokenizerHeartbeat, Hello
from sluice.wire.params import TextParams
from sluice.wire.requests import ToRouter
from sluice.wire.rows import Open, TextBatch
from sluice.wire.timing import HELLO_SECONDS
from tests.fakes.tokenizers import TINY

SECONDS = 60.0


class Router:
    """A router that collects what it receives. It reads only when a test calls `read`."""

    def __init__(self, context, address, capacity=64):
        self.inbox = Inbox(context, address, ToRouter, capacity=capacity)
        self.address = self.inbox.address
        self.texts, self.tokens, self.ends, self.started = {}, {}, {}, []
        self.heartbeats, self.gaps = [], 0
        self.attempt = 1
        self.control, self.greeted_at = None, 0.0

    def greet(self, lane):
        """Send a hello at every `read`: a draining process considers a router lost after a few seconds of silence."""
        self.control = lane
        send(lane, Hello("router", self.address))

    def read(self, seconds=0.0, limit=256):
        if self.control is not None and time.monotonic() - self.greeted_at > HELLO_SECONDS:
            self.greeted_at = time.monotonic()
            self.control.send(Hello("router", self.address))
        self.inbox.wait(seconds)
        for message in self.inbox.receive(limit):
            if isinstance(message, DetokenizerHeartbeat):
                self.heartbeats.append(message)
            elif isinstance(message, TextBatch):
                self.started += message.started
                for row in message.rows():
                    self._add(row)
            else:
                self.gaps += isinstance(message, Gap)

    def _add(self, row):
        if row.attempt != self.attempt:
            return
        assert row.request not in self.ends, "a row after the terminal"
        tokens = self.tokens.setdefault(row.request, [])
        assert row.offset == len(tokens)
        tokens += row.tokens
        self.texts[row.request] = self.texts.get(row.request, "") + row.text
        if row.end is not None:
            self.ends[row.request] = row.end

    def wait_for(self, condition, *other_routers):
        end = time.monotonic() + SECONDS
        while not condition() and time.monotonic() < end:
            self.read(0.02)
            for router in other_routers:
                router.read()
        assert condition()


def send(lane, message):
    end = time.monotonic() + SECONDS
    while not lane.send(message):
        assert time.monotonic() < end
        time.sleep(0.002)


class Process:
    """`python -m detok_service`, ready to serve."""

    def __init__(self, folder: Path, *flags):
        self.child = subprocess.Popen(
            [sys.executable, "-m", "detok_service", "--model", str(TINY), "--listen", f"ipc://{folder}/detok", *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")},
        )
        self.ready = json.loads(self.child.stderr.readline())

    def end(self) -> list[dict]:
        """Wait for the process to end, and return its log lines."""
        try:
            _, err = self.child.communicate(timeout=SECONDS)
        finally:
            self.child.kill()
        return [json.loads(line) for line in err.splitlines()]


def opening(request, router, stop, attempt=1, resume=None):
    return Open(request, attempt, 1, TextParams(stop=stop), router.address, 1, 0, resume=resume or {})
