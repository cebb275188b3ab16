"""What an attention backend is, what it needs of a step, and how one is refused on a machine that cannot use it."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_worker.attention.cache import KVCache, LayerCache


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a model; num_heads is a multiple of num_kv_heads (grouped-query attention, arXiv:2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""

    @property
    def group(self) -> int:
        """Query heads per KV head: query head h reads KV head h // group."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scaling is None else self.scaling


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """T tokens of B sequences. A sequence's tokens are adjacent; its query is the end of its context.

    Tokens from `query_start[B]` on are padding: they belong to no sequence, their slots are -1 and their output is
    undefined. Every sequence has at least one token. A sequence with context length 0 is padding too.
    """

    slots: Tensor
    """[T] int64: where each token's key and value go, block * tokens_per_block + offset; -1: nowhere."""
    block_tables: Tensor
    """[B, M] int32: each sequence's blocks in order. Entries past its context are never read, nor are those wholly
    behind the window of its first query token."""
    query_start: Tensor
    """[B + 1] int32: index of each sequence's first token, and the end of the last."""
    context_lengths: Tensor
    """[B] int32: tokens of the sequence in its block table, its last query token included. Without a window that is
    the whole sequence."""
    generation_rows: int
    """Leading sequences that have one token each."""
    max_query: int
    """At least the longest query."""
    max_context: int
    """At least the longest context; in a captured graph the most that its block tables can hold."""
    captured_context: bool = field(default=False, kw_only=True)
    """In a graph of steps with context: how many tokens each sequence has is known on the device alone. Then
    `generation_rows` is 0, and sequences without tokens are padding."""

    @property
    def generation(self) -> bool:
        """Every sequence has one token and no padding follows: B = T. Known without reading tensors."""
        return self.generation_rows == len(self.slots)

    def shared(self) -> dict[str, Any]:
        """The fields by name, for a backend's own kind of inputs."""
        return {each.name: getattr(self, each.name) for each in fields(AttentionInputs)}


class AttentionBackend(Protocol):
    """Causal attention over the paged cache, created for a model's heads and the windows of its layers."""

    name: str
    """The value of the setting `attention` that selects it."""
    graphs: bool
    """Whether `prepare` and `attend` never read a tensor's values on the host in a generation step, so that a CUDA
    graph can capture them."""
    context_graphs: bool
    """The same of a step with context, by `AttentionInputs.captured_context`."""

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:
        """Once per step: the inputs plus whatever all layers share, as `attend` expects them."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        """Store key and value [T, kv_heads, head_dim] in the cache, then attend: query [T, heads, head_dim] -> the same
        shape.

        With a window a token sees the last `window` keys, its own included: flash-attn's window_size=(window - 1, 0).
        Block table entries that lie wholly behind the window of a sequence's first query token are never read. Raises
        TypeError if `inputs` did not come from `prepare`.
        """


@dataclass(frozen=True, slots=True)
class Site:
    """The device and the model that attention is needed for."""

    device: torch.device
    capability: tuple[int, int] | None
    dtype: torch.dtype
    heads: HeadShape
    windows: tuple[int | None, ...]
    tokens_per_block: int
    """0: what the backend prefers."""
    fused: bool = True
    """Whether a Triton kernel may store keys and values (the setting `fused_kernels`)."""


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


class Refusal(StrEnum):
    """Kinds of refusal; the value follows the kernel's title in a message."""

    ABSENT = "is not available"
    """Not installed, or not for this GPU, head shape, dtype or block size: nothing is wrong."""
    FAILED = "failed"
    """Could not be loaded, or raised an error."""
    WRONG = "is wrong"
    """Ran, but does not agree with the reference."""


class RefusedError(Exception):
    """A kernel cannot be used here; as text the kind and the reason."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason

    @classmethod
    def of(cls, error: Exception) -> "RefusedError":
        """From an error that a third-party package raised."""
        kind = Refusal.ABSENT if isinstance(error, ModuleNotFoundError) else Refusal.FAILED
        return cls(kind, first_line(error).rstrip("."))


class BrokenDeviceError(ValueError):
    """A kernel under trial corrupted the process's CUDA context, so every later kernel would seem to fail as well."""


def check_device(device: torch.device, kernel: str, setting: str, error: Exception) -> None:
    """Call after a kernel under trial raised `error`. Raises BrokenDeviceError if the GPU cannot be used any more,
    naming the kernel and the setting that avoids it."""
    try:
        synchronize(device)
    except Exception as sticky:
        # An illegal access or a failed assertion is sticky: CUDA answers every later call of the process with it.
        raise BrokenDeviceError(
            f"{kernel} broke the CUDA context of {device} when it was tested: {first_line(error)}. "
            f"This process cannot use the GPU any more; start it with {setting}"
        ) from sticky


def first_line(error: BaseException) -> str:
    """The message's first line, at most 200 characters: compilers' messages go on for pages."""
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception as broken:  # noqa: BLE001 - an exception's own code may do anything
        message = f"{name}, whose message raised {type(broken).__name__}"
    return (message or name).splitlines()[0][:200]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a GPU. Raises RuntimeError if the GPU has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
