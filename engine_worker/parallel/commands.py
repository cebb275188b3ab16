"""What rank 0 tells the others, in MessagePack: a step's arrays as they are, so that they build nothing."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.runner.arrays import Arrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.step import Move


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all."""


class Load(Command, frozen=True):
    """The first: join the group, load your shard."""

    model: str
    """Folder or hub id."""
    fingerprint: str
    """Of rank 0's files."""
    config: RunnerConfig
    store: str | None
    """host:port of the group's store; None: where the environment says."""
    start_seconds: float
    """In which all have loaded."""
    silent_seconds: float
    """After so long without a command rank 0 is taken for dead."""
    revision: str | None = None
    """Of a hub id."""


class Compute(Command, frozen=True):
    """A step."""

    moves: tuple[Move, ...]
    arrays: Arrays | None
    """None: moves only."""


class Heartbeat(Command, frozen=True):
    """Nothing; whoever is through with it gets on."""


class Stop(Command, frozen=True):
    """The last."""


ORDERS = {"<i4", "<i8"}


def _pack(array: object) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a {type(array)} in a command")
    return array.dtype.newbyteorder("<").str, array.shape, np.ascontiguousarray(array).data


def _unpack(_: type, packed: Any) -> NDArray[Any]:
    """A copy that can be written to, as torch wants it."""
    kind, shape, data = packed
    if kind not in ORDERS:
        raise ValueError(f"numbers of type {kind}")
    return np.frombuffer(data, kind).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(Load | Compute | Heartbeat | Stop, dec_hook=_unpack)


def encode(command: Command) -> bytes:
    """For a channel."""
    return _encoder.encode(command)


def decode(message: bytearray) -> Load | Compute | Heartbeat | Stop:
    """Raises msgspec.DecodeError on what is no command."""
    found: Load | Compute | Heartbeat | Stop = _decoder.decode(message)
    return found
