"""Commands from rank 0 to the other ranks, in MessagePack. A step travels as finished arrays, so followers build
nothing."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.lora.device import LoadPlan
from engine_worker.runner.batch import StepArrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.sampling.replicas import ReplicatedStep
from engine_worker.step import Move
from sluice.ring.calls import MethodCall
from sluice.settings.engine import ProcessorNames


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class."""


class LoadModel(Command, frozen=True):
    """The first command: join the group and load this rank's shard."""

    model: str
    """Folder or hub id."""
    fingerprint: str
    config: RunnerConfig
    store: str | None
    """host:port of the group's store; None: as given in the environment."""
    start_seconds: float
    """Time limit for all ranks to load."""
    silent_seconds: float
    """After so long without a command rank 0 counts as dead."""
    revision: str | None = None
    processors: ProcessorNames | None = None
    """Those that this rank calls too; None: it calls none."""


class ComputeStep(Command, frozen=True):
    moves: tuple[Move, ...]
    arrays: StepArrays | None
    """None: moves only."""
    processed: ReplicatedStep | None = None
    """If it has rows, rank 0 broadcasts after the step the tokens that they follow [P] int64, then their logits
    [P, vocab] float32."""
    loads: tuple[LoadPlan, ...] = ()
    """Of LoRA adapters, before the step: rank 0 broadcasts their weights."""


class CallMethod(Command, frozen=True):
    number: int
    """Of the call: each rank that it names stores its answer in the group's store under it."""
    call: MethodCall


class Heartbeat(Command, frozen=True):
    """No work; a rank that completes it is making progress."""


class Shutdown(Command, frozen=True):
    """The last command."""


NUMBER_TYPES = {"<i4", "<i8"}


def _pack(array: object) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a {type(array)} in a command")
    return array.dtype.newbyteorder("<").str, array.shape, np.ascontiguousarray(array).data


def _unpack(_: type, packed: Any) -> NDArray[Any]:
    kind, shape, data = packed
    if kind not in NUMBER_TYPES:
        raise ValueError(f"numbers of type {kind}")
    # A copy, since torch.from_numpy needs writable memory.
    return np.frombuffer(data, kind).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
Commands = LoadModel | ComputeStep | CallMethod | Heartbeat | Shutdown
_decoder = msgspec.msgpack.Decoder(Commands, dec_hook=_unpack)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(message: bytearray) -> Commands:
    """Raises msgspec.DecodeError on an invalid message."""
    found: Commands = _decoder.decode(message)
    return found
