"""What an attention backend is, and how one is refused on a machine where it cannot be used."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.inputs import AttentionInputs


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


class AttentionBackend(Protocol):
    """Causal attention over the paged cache, created for a model's heads and the windows of its layers."""

    name: str
    """The value of the setting `attention` that selects it."""
    graphs: bool
    """Whether `prepare` and `attend` never read a tensor's values on the host in a generation step, so that a CUDA
    graph can capture them."""

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:
        """Once per step: the inputs plus whatever all layers share, as `attend` expects them."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        """Store key and value [T, kv_heads, head_dim] in the cache, then attend: query [T, heads, head_dim] -> the same
        shape.

        With a window a token sees the last `window` keys, its own included: flash-attn's window_size=(window - 1, 0).
        Block table entries that lie wholly behind the window of a sequence's first query token are never read. Raises
        TypeError if `inputs` did not come from `prepare`.
        """
        ...


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
        """One line."""

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


def first_line(error: Exception) -> str:
    """The message's first line, at most 200 characters: compilers' messages go on for pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on a GPU; on a CPU there is none. Raises RuntimeError if the GPU has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
