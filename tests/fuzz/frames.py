"""Malformed frames: real messages of every kind with bits flipped, parts removed or joined, and values replaced."""

import random
from typing import Any

import msgspec

from sluice.lanes.lane import HEADER, MAGIC
from sluice.wire.message import VERSION, Message

NUMBERS = (0, 1, -1, 2, 127, 128, 4096, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1e300, -1e300, float("nan"), float("inf"), float("-inf"), 5e-324)
TEXTS = (
    "", "\0", "a" * 2000, "\U0001f600", "ipc://", "ipc:///nowhere/socket", "ipc:///tmp", "tcp://", "tcp://127.0.0.1:1",
    "tcp://*:*", "inproc://zeromq.zap.01", "udp://127.0.0.1:1", "mem://x", "\x1b[31m",
)  # fmt: skip
OTHERS = (None, True, False, b"", b"\xff" * 40, [], {}, [[]] * 50, {0: 0}, {"a": {}}, [None] * 300)
LANES = 8


class Mutator:
    """Generates frames by mutating templates. The same seed and templates give the same frames."""

    def __init__(self, templates: list[Message], seed: int) -> None:
        self._chance = random.Random(seed)
        self._bodies = [msgspec.msgpack.encode(template) for template in templates]
        self._lanes = [[self._chance.getrandbits(64), 0] for _ in range(LANES)]

    def frame(self) -> bytes:
        """The next frame: header and body. Half of the bodies are well-formed MessagePack, most headers are valid."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.02:
            return chance.randbytes(chance.randint(0, 200))
        body = chance.choice(self._bodies)
        if kind < 0.55:
            body = self._restructured(body)
        elif kind < 0.95:
            body = self._damaged(body)
        frame = self._header() + body
        return self._damaged(frame) if chance.random() < 0.02 else frame

    def _header(self) -> bytes:
        if self._chance.random() < 0.5:
            # The first frame of a new lane, so that no gap is reported before it.
            return HEADER.pack(MAGIC, VERSION, self._chance.getrandbits(64), 0)
        lane = self._chance.choice(self._lanes)
        lane[1] += 1
        if self._chance.random() < 0.01:
            number = self._chance.choice((0, lane[1] + 1000, 2**40, 2**63, 2**64 - 1))
            return HEADER.pack(MAGIC, VERSION, self._chance.getrandbits(64), number)
        return HEADER.pack(MAGIC, VERSION, lane[0], lane[1])

    def _restructured(self, body: bytes) -> bytes:
        value = msgspec.msgpack.decode(body, strict=False)
        if self._chance.random() < 0.5 and type(value[1]) is int:
            # Changes the request number, so that messages concern different requests.
            value[1] = self._chance.getrandbits(8)
        for _ in range(self._chance.choice((1, 1, 1, 2, 5))):
            value = self._changed(value)
        return msgspec.msgpack.encode(value)

    def _changed(self, value: Any, depth: int = 0) -> Any:
        """A copy in which one part, at any depth, is replaced."""
        chance = self._chance
        if not isinstance(value, list | dict) or not value or (depth and chance.random() < 0.2):
            return self._replacement(value)
        if isinstance(value, dict):
            key = chance.choice(list(value))
            changed = dict(value)
            if chance.random() < 0.3 and isinstance(key, int):
                changed[chance.choice(NUMBERS)] = changed.pop(key)
            else:
                changed[key] = self._changed(changed[key], depth + 1)
            return changed
        changed, at = list(value), chance.randrange(len(value))
        match chance.randint(0, 9):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[at])
            case 2 if depth:
                changed *= chance.choice((2, 30))
            case _:
                # Keeps the tag at the start of a message: with a wrong tag, the fields would not be decoded at all.
                at = at or (len(value) > 1 and depth == 0)
                changed[at] = self._changed(changed[at], depth + 1)
        return changed

    def _replacement(self, value: Any) -> Any:
        chance = self._chance
        if chance.random() < 0.2:
            return chance.choice((*NUMBERS, *FLOATS, *TEXTS, *OTHERS))
        match value:
            case bool():
                return not value
            case int():
                return chance.choice(
                    (*NUMBERS, min(value + 1, 2**64 - 1), max(value - 1, -(2**63)), chance.getrandbits(16))
                )
            case float():
                return chance.choice(FLOATS)
            case str():
                return chance.choice((*TEXTS, value * 2, value[:-1]))
            case _:
                return chance.choice((None, [], {}, [value], chance.choice(NUMBERS)))

    def _damaged(self, data: bytes) -> bytes:
        chance, damaged = self._chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 6))):
            at, size = chance.randint(0, len(damaged)), chance.randint(1, 12)
            match chance.randint(0, 5):
                case 0 | 1 if damaged:
                    damaged[at % len(damaged)] ^= 1 << chance.randint(0, 7)
                case 2:
                    del damaged[at : None if chance.random() < 0.3 else at + size]
                case 3:
                    damaged[at:at] = chance.randbytes(size)
                case 4:
                    other_body = chance.choice(self._bodies)
                    damaged[at:] = other_body[chance.randint(0, len(other_body)) :]
                case _:
                    # MessagePack: deep nesting, and arrays and maps that claim to be huge.
                    damaged[at:at] = chance.choice((b"\x91" * 3000, b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff"))
        return bytes(damaged)
