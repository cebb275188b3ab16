"""What an attention backend is."""

from dataclasses import dataclass
from typing import Protocol

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
        """Query heads that share a KV head: query head h reads KV head h // group."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5) if self.scaling is None else self.scaling


class AttentionBackend(Protocol):
    """Causal attention over the paged cache; made for a model's heads and the windows of its layers."""

    name: str
    """As in the settings."""
    graphs: bool
    """Whether `prepare` and `attend` of a generation step look at no tensor's values on the host, so that a CUDA graph
    can hold them."""

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> AttentionInputs:
        """Once per step: the inputs with whatever all layers share, as `attend` takes them."""
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
        """Store key and value [T, kv_heads, head_dim] in the cache, then attend: query [T, heads, head_dim] -> same
        shape.

        With a window a token sees the last `window` keys, its own included: flash-attn's window_size=(window - 1, 0).
        Entries of a block table that lie wholly behind the window of the sequence's first query token are never read.
        """
        ...
