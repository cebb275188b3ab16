"""What the engine, the template process and the guide worker send each other: msgspec over sockets."""

from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from sluice.ring.params import Guide

Key = bytes
"""Of a guide: see `key_of`."""
MAX_COMPILED = 64
"""Guides that a guide worker keeps."""
FORK = b"f"
"""engine → template: a new guide worker, with its descriptors."""


class Outcome(Enum):
    """Of a trial compilation."""

    COMPILED = "compiled"
    INVALID = "invalid"
    """The library refuses it."""
    DIED = "died"
    """The process ended; see `Tried.signal`."""
    LOST = "lost"
    """It stood still, or was killed by something else: nothing is known about the guide."""


class Try(msgspec.Struct, frozen=True, array_like=True):
    """engine → template: compile in a process of its own, to see whether that ends."""

    key: Key
    guide: Guide


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """template → engine."""

    key: Key
    outcome: Outcome
    message: str = ""
    """Of the library."""
    signal: int = 0
    """That ended the process; 0: it exited."""


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """template → engine, first of all."""

    size: int
    """Ids in a mask."""
    error: str = ""
    """Why the tokenizer cannot be used."""


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """engine → guide worker; answered with the key. Also brings what no longer lives."""

    key: Key
    guide: Guide
    released: list[int] = []


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Ask for the mask of a sequence after its first `keep` tokens, which the worker knows already, and `tokens`."""

    slot: int
    """Row of the shared memory for the mask."""
    sequence: int
    keep: int
    tokens: list[int]
    key: Key
    ends: tuple[int, ...]
    """Ids that end the sequence where its grammar is complete."""
    may_end: bool
    """False: min_tokens forbids these."""
    guide: Guide | None = None
    """Only if the worker had none or a former one was killed."""


class AskMasks(msgspec.Struct, frozen=True, array_like=True):
    """engine → guide worker: rows of a step, in the order to compute them."""

    rows: list[Row]
    num_slots: int
    """That the shared memory holds."""
    never: tuple[int, ...]
    """Ids that stand for no text."""
    released: list[int] = []
    """Sequences that have ended."""


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Of a row without a mask."""

    consumed: int
    """Tokens that the grammar allows: fewer than asked for leave no mask."""
    known: bool = True
    """False: the worker needs the guide and all tokens."""
    complete: bool = False
    """Nothing more can follow, and no end is left to draw."""
    later: bool = False
    """The worker has to compile the guide first, and has compiled another one for the same message."""
    error: str = ""
    """Of the library: the matcher cannot go on."""


class MasksReady(msgspec.Struct, frozen=True, array_like=True):
    """guide worker → engine: the masks are written."""

    unusual: dict[int, RowResult]
    """By slot: rows whose result is something else."""


_encoder = msgspec.msgpack.Encoder()
_decoders: Mapping[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Try, Tried, Compile, AskMasks, MasksReady)
}


def send(connection: Connection, message: msgspec.Struct) -> None:
    """Raises OSError if the other end has closed."""
    connection.send_bytes(_encoder.encode(message))


M = TypeVar("M", bound=msgspec.Struct)


def receive(connection: Connection, kind: type[M]) -> M:
    """Waits. Raises EOFError or OSError if the other end has closed."""
    found: M = _decoders[kind].decode(connection.recv_bytes())
    return found


def key_of(guide: Guide) -> Key:
    return blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()
