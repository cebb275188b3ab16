"""A peer that holds the key of a detokenizer or an engine, and the frames that it sends to harm others."""

import itertools
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sluice.lanes.keys import Keys, Role
from sluice.lanes.lane import MAX_FRAME_BYTES, header
from sluice.launch import Ring
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, KeepAlive
from sluice.wire.message import Message
from sluice.wire.params import TextParams
from sluice.wire.rows import Open, TextBatch, TokenBatch
from sluice.wire.stats import StepStats

ENCODER = msgspec.msgpack.Encoder()
BIG = MAX_FRAME_BYTES - 64
Frames = Iterator[bytes]


class LoggedRing(Ring):
    """A ring with keys whose log is kept."""

    def __init__(self, keys: Path, **options: Any) -> None:
        self.log: list[dict[str, Any]] = []
        """Lines as objects, with the service (child) and the time at which they arrived (at)."""
        super().__init__(keys=str(keys), observe=self._keep, **options)

    def inbox(self, service: str) -> str:
        ready = next(line for line in self.log if line["event"] == "ready" and line["child"] == service)
        return str(ready.get("inbox") or ready["address"])

    def _keep(self, line) -> None:
        if line.text.startswith("{"):
            self.log.append({"child": line.child, "at": time.monotonic(), **json.loads(line.text)})

    def events(self, since: float) -> Counter[str]:
        return Counter(line["event"] for line in self.log if line["at"] >= since)


class Liar:
    """Sends frames to an inbox in a thread, as fast as they are accepted, while the context is open."""

    def __init__(self, keys: Path, role: Role, address: str, receiver: Role, frames: Frames, pause: float = 0) -> None:
        self.sent = 0
        self._own, self._address, self._frames, self._pause = Keys(keys, role), address, frames, pause
        self._server = self._own.public(receiver)[0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Liar":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDTIMEO, 100)
            socket.set(zmq.CURVE_PUBLICKEY, self._own.own.public)
            socket.set(zmq.CURVE_SECRETKEY, self._own.own.secret)
            socket.set(zmq.CURVE_SERVERKEY, self._server)
            socket.connect(self._address)
            while not self._ended.is_set() and (frame := next(self._frames, None)) is not None:
                self._send(socket, frame)
                time.sleep(self._pause)

    def _send(self, socket: "zmq.Socket[bytes]", frame: bytes) -> None:
        while not self._ended.is_set():
            try:
                socket.send(frame, copy=False)
            except zmq.Again:
                continue
            self.sent += 1
            return


def garbage(size: int) -> Frames:
    return itertools.repeat(b"\xff" * size)


def replays(message: Message) -> Frames:
    """The same frame again and again."""
    return itertools.repeat(header(secrets.randbits(64), 0) + ENCODER.encode(message))


def repeated(message: Message) -> Frames:
    """A lane with the same message again and again."""
    lane, body = secrets.randbits(64), ENCODER.encode(message)
    return (header(lane, number) + body for number in itertools.count())


def changing(make: Callable[[int], Message]) -> Frames:
    lane = secrets.randbits(64)
    return (header(lane, number) + ENCODER.encode(make(number)) for number in itertools.count())


def gaps(message: Message) -> Frames:
    """Lanes whose second frame reveals a gap."""
    body, lanes = ENCODER.encode(message), iter(lambda: secrets.randbits(64), None)
    return (header(lane, number) + body for lane in lanes for number in (0, 1000))


# To routers.


def text(detokenizer: str, rows: int = 1) -> TextBatch:
    zeros = [0] * rows
    return TextBatch(detokenizer, [], [7] * rows, zeros, zeros, zeros, zeros, [], {}, {}, [""] * rows)


def detokenizer_heartbeat(name: str, address: str, epoch: int, missed: int = 0) -> DetokenizerHeartbeat:
    lost = {epoch * 100_000 + i: 1 for i in range(missed)}
    return DetokenizerHeartbeat(name, epoch, address, False, 0, 0, 0.0, missed=lost)


def engine_heartbeat(name: str, address: str, epoch: int) -> EngineHeartbeat:
    return EngineHeartbeat(name, epoch, address, "fingerprint", 1 << 20, True, StepStats(max_requests=1))


def empty_statistics(count: int) -> bytes:
    """An engine's heartbeat with `count` empty lists as statistics of steps, a byte each."""
    encoded = msgspec.to_builtins(engine_heartbeat("liar", "ipc:///liar", 1))
    encoded[EngineHeartbeat.__struct_fields__.index("steps") + 1] = [[]] * count
    return header(secrets.randbits(64), 0) + ENCODER.encode(encoded)


# To detokenizers.


def keep_alive(engine: str, epoch: int) -> KeepAlive:
    return KeepAlive(engine, epoch)


def opening(router: str) -> TokenBatch:
    opened = Open(secrets.randbits(63), 0, 1, TextParams(), router, 1, 0)
    return TokenBatch("liar", 1, [opened], [], [], [], [], [], [], {}, {})


def unknown_rows(request: int, rows: int) -> TokenBatch:
    zeros = [0] * rows
    return TokenBatch("liar", 1, [], [request + i for i in range(rows)], zeros, zeros, zeros, zeros, [], {}, {})
