"""Messages between the engine, the template process and the guide worker: msgspec over sockets. Waits for them end if a
signal has stopped the other process."""

import select
from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sluice.wire.params import Guide

Key = bytes
"""Identifies a guide; see `key_of`."""
MAX_COMPILED = 64
"""Guides that a guide worker keeps compiled."""
COMPILE_SLOTS = 2
"""Guides that a guide worker compiles at the same time for later steps."""
FORK = b"f"
"""engine → template: fork a new guide worker; sent with the worker's descriptors."""
STOPPED_SECONDS = 0.25
"""A process that does not answer for this long is checked: the step of every request may be waiting for it."""


class Outcome(Enum):
    """Outcome of a trial compilation."""

    COMPILED = "compiled"
    INVALID = "invalid"
    """The guide cannot be compiled; `TrialResult.message` says why."""
    DIED = "died"
    """The trial process ended by `TrialResult.signal`."""
    LOST = "lost"
    """The trial process hung, or was killed by another process: this says nothing about the guide."""


class StartTrial(msgspec.Struct, frozen=True, array_like=True):
    """engine → template: compile the guide in a separate process, to find out whether that stays within the budgets."""

    key: Key
    guide: Guide


class TrialResult(msgspec.Struct, frozen=True, array_like=True):
    """template → engine."""

    key: Key
    outcome: Outcome
    message: str = ""
    """Error message of the compilation."""
    signal: int = 0
    """Signal that ended the process; 0 if it exited."""


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """template → engine: the first message, after the tokenizer was loaded or failed to load."""

    size: int
    """Ids in a mask."""
    error: str = ""
    """Why the tokenizer cannot be used; empty if it can."""


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """engine → guide worker; answered with the key."""

    key: Key
    guide: Guide
    released: list[int] = []
    """Numbers of sequences that have ended."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Requests the mask of a sequence after its first `keep` tokens, which the worker has, and `tokens`."""

    slot: int
    """Row of the shared memory for the mask."""
    sequence: int
    """Number of the sequence."""
    keep: int
    tokens: list[int]
    key: Key
    ends: tuple[int, ...]
    """Ids that end the sequence where its grammar is complete."""
    may_end: bool
    """False if min_tokens forbids these ids."""
    guide: Guide | None = None
    """Set if the worker lacks the guide, or has replaced one that died; `tokens` are then all tokens."""


class ComputeMasks(msgspec.Struct, frozen=True, array_like=True):
    """engine → guide worker: the rows of a step, in the order in which to compute them."""

    rows: list[Row]
    num_slots: int
    """Slots of the shared memory."""
    never: tuple[int, ...]
    """Ids that must not be sampled as text, whether or not they end a sequence."""
    released: list[int] = []
    """Numbers of sequences that have ended."""


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a row without a mask."""

    consumed: int
    """Leading tokens that the grammar allows. There is no mask if these are not all."""
    known: bool = True
    """False if the worker needs the guide and all tokens."""
    complete: bool = False
    """No token can follow, and there is no end id to sample."""
    later: bool = False
    """The guide is not compiled, and the worker has compiled another one for the same message."""
    error: str = ""
    """Error message of the matcher, which cannot continue."""


class MasksReady(msgspec.Struct, frozen=True, array_like=True):
    """guide worker → engine: all masks are written."""

    unusual: dict[int, RowResult]
    """By slot: results of the rows without a mask."""


_encoder = msgspec.msgpack.Encoder()
_decoders: Mapping[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (StartTrial, TrialResult, Compile, ComputeMasks, MasksReady)
}


def send(connection: Connection, message: msgspec.Struct) -> None:
    """Raises OSError if the other end is closed."""
    connection.send_bytes(_encoder.encode(message))


M = TypeVar("M", bound=msgspec.Struct)


def receive(connection: Connection, kind: type[M]) -> M:
    """Wait for a message of this type. Raises EOFError or OSError if the other end is closed."""
    message: M = _decoders[kind].decode(connection.recv_bytes())
    return message


def key_of(guide: Guide) -> Key:
    return blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()


def poll_of(descriptor: int) -> select.poll:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return poll


def wait_for(poll: select.poll, pid: int, seconds: float) -> None:
    """Wait until there is something to read from a process. Raises BlockingIOError after `seconds`, or as soon as a
    signal has stopped the process."""
    for _ in range(max(1, round(seconds / STOPPED_SECONDS))):
        if poll.poll(1000 * STOPPED_SECONDS):
            return
        if is_stopped(pid):
            break
    raise BlockingIOError(f"process {pid} does not answer")


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in ("T", "t")
