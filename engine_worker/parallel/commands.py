"""Commands from rank 0 to the other ranks, in MessagePack. A step is sent as complete arrays, so followers need not
build them."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.lora.device import LoadPlan
from engine_worker.runner.batch import StepArrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.sampling.replicas import ReplicatedStep
from engine_worker.step import Move
from sluice.settings.engine import ProcessorNames
from sluice.wire.calls import MethodCall


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of all commands."""


class LoadModel(Command, frozen=True):
    """The first command: join the group and load this rank's shard."""

    model: str
    """Folder or Hugging Face id."""
    fingerprint: str
    config: RunnerConfig
    store: str | None
    """host:port of the group's store; None: torchrun's environment variables name the store."""
    start_seconds: float
    """Time limit for all ranks to load."""
    silent_seconds: float
    """Rank 0 counts as dead after this time without a command."""
    revision: str | None = None
    processors: ProcessorNames | None = None
    """Logits processors that this rank calls too; None: it calls none."""


class ComputeStep(Command, frozen=True):
    moves: tuple[Move, ...]
    arrays: StepArrays | None
    """None: there are only moves and loads."""
    processed: ReplicatedStep | None = None
    """If it has rows, rank 0 broadcasts two tensors after the step: the tokens that the rows follow, [P] int64, and
    their logits, [P, vocab] float32."""
    loads: tuple[LoadPlan, ...] = ()
    """LoRA adapters to load before the step; rank 0 broadcasts their weights."""


class CallMethod(Command, frozen=True):
    number: int
    """Number of the call, under which each rank that it names puts its answer into the group's store."""
    call: MethodCall


class Heartbeat(Command, frozen=True):
    """Does nothing; completing it shows that a rank is alive and not stuck."""


class Shutdown(Command, frozen=True):
    """The last command."""


NUMBER_TYPES = {"<i4", "<i8"}


def _pack(array: object) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"commands cannot contain a {type(array)}")
    return array.dtype.newbyteorder("<").str, array.shape, np.ascontiguousarray(array).data


def _unpack(_: type, packed: Any) -> NDArray[Any]:
    kind, shape, data = packed
    if kind not in NUMBER_TYPES:
        raise ValueError(f"an array in a command has type {kind!r}, must be one of {', '.join(sorted(NUMBER_TYPES))}")
    # A copy, since torch.from_numpy needs writable memory.
    return np.frombuffer(data, kind).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
Commands = LoadModel | ComputeStep | CallMethod | Heartbeat | Shutdown
_decoder = msgspec.msgpack.Decoder(Commands, dec_hook=_unpack)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode(message: bytearray) -> Commands:
    """Raises msgspec.DecodeError on an invalid message."""
    command: Commands = _decoder.decode(message)
    return command
