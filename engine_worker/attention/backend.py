"""The interface of attention backends, their inputs, and the errors of a backend that cannot be used on a machine."""

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
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""

    @property
    def group(self) -> int:
        """Query heads per KV head: query head h reads KV head h // group."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scaling is None else self.scaling


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """T tokens of B sequences. A sequence's tokens are adjacent, and are the last tokens of its context.

    Tokens from `query_start[B]` on are padding: they belong to no sequence, their slots are -1 and their output is
    undefined. Every sequence has at least one token. A sequence with context length 0 is padding too.
    """

    slots: Tensor
    """[T] int64: where each token's key and value are stored, block * tokens_per_block + offset; -1: not stored."""
    block_tables: Tensor
    """[B, M] int32: each sequence's blocks in order. Not read: entries past its context, and blocks that lie entirely
    before the window of its first query token."""
    query_start: Tensor
    """[B + 1] int32: index of each sequence's first token, and the end of the last."""
    context_lengths: Tensor
    """[B] int32: tokens of the sequence in its block table, its last query token included. Without a window that is
    the whole sequence."""
    generation_rows: int
    """Number of leading sequences that have one token each."""
    max_query: int
    """Upper bound of the sequences' query lengths."""
    max_context: int
    """Upper bound of the context lengths; in a captured graph, the capacity of a row of the block tables."""
    captured_context: bool = field(default=False, kw_only=True)
    """Set in a CUDA graph of steps with context: the number of each sequence's tokens is known on the device only. Then
    `generation_rows` is 0, and sequences without tokens are padding."""

    @property
    def generation(self) -> bool:
        """Whether every sequence has one token and there is no padding (B = T); known without reading tensors."""
        return self.generation_rows == len(self.slots)

    def shared(self) -> dict[str, Any]:
        """The fields by name, to construct a backend's subclass."""
        return {shared.name: getattr(self, shared.name) for shared in fields(AttentionInputs)}


class AttentionBackend(Protocol):
    """Causal attention over the paged cache, created for a model's heads and the windows of its layers."""

    name: str
    """The value of the setting `attention` that selects it."""
    graphs: bool
    """Whether a CUDA graph can capture a generation step: `prepare` and `attend` never read a tensor's values on the
    host in it."""
    context_graphs: bool
    """Whether a CUDA graph can capture a step with context; see `AttentionInputs.captured_context`."""

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:
        """Called once per step. Returns the inputs for `attend`, with everything computed that the layers share."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        """Store key and value [T, kv_heads, head_dim] in the cache, then attend: query [T, heads, head_dim] -> the same
        shape.

        With a window, a token attends to the last `window` keys, its own included: flash-attn's
        window_size=(window - 1, 0). Blocks that lie entirely before the window of a sequence's first query token are
        not read. Raises TypeError if `inputs` did not come from `prepare`.
        """


@dataclass(frozen=True, slots=True)
class Site:
    """The device and the model for which a backend is chosen."""

    device: torch.device
    capability: tuple[int, int] | None
    """CUDA compute capability; None on a CPU."""
    dtype: torch.dtype
    heads: HeadShape
    windows: tuple[int | None, ...]
    """Attention window of each layer, in tokens; None: unlimited."""
    tokens_per_block: int
    """0: the backend's preferred size."""
    fused: bool = True
    """Whether a Triton kernel may store keys and values (the setting `fused_kernels`)."""


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


class Refusal(StrEnum):
    """Why a kernel is not used; in messages the value follows the kernel's title."""

    ABSENT = "is not available"
    """Not installed, or it does not support this GPU, head shape, dtype or block size. Not a fault."""
    FAILED = "failed"
    """Could not be loaded, or raised an error."""
    WRONG = "is wrong"
    """Ran, but its results differ from the reference's."""


class RefusedError(Exception):
    """A kernel cannot be used on this machine; the message states the kind and the reason."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.reason)

    @classmethod
    def of(cls, error: Exception) -> "RefusedError":
        """From an error that a third-party package raised."""
        kind = Refusal.ABSENT if isinstance(error, ModuleNotFoundError) else Refusal.FAILED
        return cls(kind, first_line(error).rstrip("."))


class BrokenDeviceError(ValueError):
    """A kernel corrupted the process's CUDA context while it was tested, so every later kernel would fail too."""


def check_device(device: torch.device, kernel: str, setting: str, error: Exception) -> None:
    """Call when a kernel raised `error` while it was tested. Raises BrokenDeviceError if this process cannot use the
    GPU any more; the message names the kernel and the setting that avoids it."""
    try:
        synchronize(device)
    except Exception as sticky:
        # An illegal access or a failed assertion is sticky: every later CUDA call of the process fails with it.
        raise BrokenDeviceError(
            f"{kernel} broke the CUDA context of {device} when it was tested: {first_line(error)}. "
            f"This process cannot use the GPU any more; start it with {setting}"
        ) from sticky


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters: a compiler's message may be pages long."""
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception as broken:  # noqa: BLE001 - a third-party __str__ may raise anything
        message = f"{name}, whose __str__ raised {type(broken).__name__}"
    return (message or name).splitlines()[0][:200]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a GPU. Raises RuntimeError if the GPU has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
