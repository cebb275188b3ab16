"""A detokenizer with in-memory lanes, and the messages that tests send to it."""

import structlog

from detok_service.decoders import Decoders, TextError
from detok_service.service import Detokenizer, Identity
from sluice.wire.errors import FinishReason
from sluice.wire.params import TextParams
from sluice.wire.rows import End, Open, Times, TokenBatch, TokenRow
from tests.fakes.lanes import FakeLane

LENGTH = End(FinishReason.LENGTH, Times(1.0, 2.0, 3.0))
POISON = 13


class Letters:
    """A decoder that maps token 0 to "a", token 1 to "b" and so on. The token POISON raises an error."""

    def follow(self, prompt):
        self.feed(prompt)

    def feed(self, tokens):
        if POISON in tokens:
            raise TextError("poison")
        return "".join(chr(ord("a") + token) for token in tokens)

    def flush(self):
        return ""


class Bench:
    """A service with in-memory lanes and a manual clock."""

    def __init__(self, max_streams=1000, new=Letters):
        self.now = 100.0
        self.lanes = {}
        self.service = Detokenizer(
            Identity("detok", 9, "inbox"),
            Decoders("letters", new, new),
            self._open,
            max_streams,
            structlog.get_logger(),
            lambda: self.now,
        )

    def _open(self, address):
        if address == "nonsense":
            raise ValueError("no address")
        self.lanes[address] = FakeLane()
        return self.lanes[address]

    @property
    def remembered(self):
        """Number of sequences that have ended here but not yet at their engine."""
        return len(self.service._table._closed)

    def handle(self, *messages):
        self.service.handle(messages)

    def heartbeat(self, seconds=0.5):
        self.now += seconds
        self.service.tick()

    def texts(self, address="router"):
        """Text and finish reason or fault code by (request, sequence)."""
        texts = {}
        for row in self.lanes[address].rows():
            text, end = texts.get((row.request, row.sequence), ("", None))
            assert end is None, "a row after the terminal"
            if row.end is not None:
                end = row.end.fault.error_code if row.end.fault else row.end.reason
            texts[row.request, row.sequence] = (text + row.text, end)
        return texts


def opened(request, n=1, router="router", attempt=1, resume=(), ended=(), **text):
    return Open(request, attempt, n, TextParams(**text), router, 5, 2, 0.0, dict(resume), list(ended))


def row(request, offset, tokens, end=None, sequence=0, logprobs=(), attempt=1):
    return TokenRow(request, attempt, sequence, offset, list(tokens), list(logprobs), end)


def batch(*rows, opens=(), engine="engine", epoch=1):
    return TokenBatch.of(engine, epoch, list(opens), list(rows))
