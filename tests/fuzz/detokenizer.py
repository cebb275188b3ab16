"""Sends mutated frames to a detokenizer: its inbox, its service, its lanes."""

import tempfile
from collections.abc import Callable
from functools import partial

import structlog
import zmq
from tokenizers import Tokenizer

from detok_service.decoders import load_decoders
from detok_service.service import Detokenizer, Identity
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.message import Message
from sluice.wire.params import TextParams
from sluice.wire.requests import Drop, ToDetokenizer, ToRouter
from sluice.wire.rows import End, Open, TextBatch, Times, TokenBatch, TokenLogprob, TokenRow
from tests.fakes.tokenizers import TINY
from tests.fuzz.frames import Mutator
from tests.fuzz.sender import Deadline, Sender, flood

TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)  # \U0001f680 done\n"
TIMES = Times(0.1, 0.2, 0.3)
HELLO_TURNS = 100


def templates(router: str) -> list[Message]:
    """Messages of every kind that a detokenizer receives."""
    opens = [
        Open(11, 0, 1, TextParams(stop=("}", "\n\n")), router, 5, 2),
        Open(12, 1, 3, TextParams(interval=4, min_tokens=2), router, 5, 0, 0.5, {1: [5, 6]}, [2]),
    ]
    rows = [
        TokenRow(11, 0, 0, 0, [5, 6, 7], [TokenLogprob(-0.5, 1, [(5, -0.5), (6, -1.5)])] * 3, None),
        TokenRow(12, 1, 0, 0, [8, 300], [], End(FinishReason.EOS, TIMES, stop_token=2)),
        TokenRow(12, 1, 1, 2, [], [], End(FinishReason.ERROR, TIMES, fault=Fault("STEP_FAILED", "so"))),
    ]
    return [
        TokenBatch.of("other-engine", 77, opens, rows),
        TokenBatch.of("other-engine", 77, [], rows),
        KeepAlive("other-engine", 77),
        Hello("other-router", router),
        Drop(11, 1),
    ]


def run(frames: int, seed: int, tick: Callable[[int], None]) -> str:
    """Send `frames` frames. Calls `tick` with the number sent so far. Returns a summary for people."""
    with tempfile.TemporaryDirectory(prefix="sl") as folder, zmq.Context() as context:
        good, sink = (Inbox(context, f"ipc://{folder}/{name}", ToRouter) for name in ("good", "sink"))
        inbox = Inbox(context, f"ipc://{folder}/detok", ToDetokenizer)
        service = Detokenizer(
            Identity("detok", 1, inbox.address),
            load_decoders(TINY / "tokenizer.json"),
            partial(Lane, context),
            5_000,
            structlog.get_logger(),
        )
        mutator, sender = Mutator(templates(sink.address), seed), Sender(context, inbox.address)
        lane = Lane(context, inbox.address)
        streams, deadline = HealthyStreams(lane, good), Deadline()

        def turn() -> None:
            service.handle(inbox.receive())
            service.tick()
            sink.receive()
            streams.turn()
            deadline.check()

        flood(frames, mutator, sender, deadline, turn, tick)
        deadline.renew()
        target = streams.done + 3
        while inbox.waiting or streams.done < target:
            turn()
        sender.close()
        lane.close()
        service.close(0.0)
        for closing in (inbox, good, sink):
            closing.close()
    return (
        f"{inbox.malformed} malformed, {inbox.gaps} gaps, {service.streams} streams left, "
        f"{streams.done} healthy streams"
    )


class HealthyStreams:
    """Well-formed streams, one after the other. Checks that the text of each is right."""

    def __init__(self, lane: Lane, inbox: "Inbox[TextBatch]") -> None:
        self.done = 0
        tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self._tokens = tokenizer.encode(TEXT).ids
        self._lane, self._inbox = lane, inbox
        self._sent, self._text, self._turns = 0, "", 0
        self._request = 1 << 60

    def turn(self) -> None:
        """Send a Hello now and then, send the next token, and read what has arrived."""
        if not self._turns % HELLO_TURNS:
            self._lane.send(Hello("good-router", self._inbox.address))
        self._turns += 1
        opens = [Open(self._request, 0, 1, TextParams(), self._inbox.address, 1, 0)] if not self._sent else []
        if self._sent < len(self._tokens):
            end = End(FinishReason.LENGTH, TIMES) if self._sent == len(self._tokens) - 1 else None
            row = TokenRow(self._request, 0, 0, self._sent, [self._tokens[self._sent]], [], end)
            self._sent += self._lane.send(TokenBatch.of("good-engine", 5, opens, [row]))
        for message in self._inbox.receive():
            for row in message.rows() if isinstance(message, TextBatch) else ():
                self._on_row(row)

    def _on_row(self, row) -> None:
        if row.request != self._request:
            # Losses of streams that were never opened are reported to all routers.
            return
        self._text += row.text
        if row.end is not None:
            assert (row.end.reason, self._text) == (FinishReason.LENGTH, TEXT), (row.end, self._text)
            self.done += 1
            self._request += 1
            self._sent, self._text = 0, ""
