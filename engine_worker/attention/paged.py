"""Attention by a kernel that reads the cache's pages itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.inputs import AttentionInputs, PagedInputs
from engine_worker.attention.store import Store

Splits = Callable[[HeadShape, tuple[int | None, ...]], bool]
"""(heads, windows of the layers) -> whether long contexts of generation rows are split over the GPU."""
Attend = Callable[[Tensor, LayerCache, PagedInputs, float, int | None], Tensor]
"""(query [T, heads, head_dim], cache, inputs, scale of the scores, window) -> the same shape as the query."""


def _always(heads: HeadShape, windows: tuple[int | None, ...]) -> bool:  # noqa: ARG001
    return True


@dataclass(frozen=True, slots=True)
class Kernel:
    """One that may be here, and what it asks for; see `engine_worker.attention.choice`."""

    name: str
    """As in the settings."""
    title: str
    """For people."""
    load: Callable[[], Attend]
    """Raises ModuleNotFoundError or RefusedError where it is not here, other errors where it is broken."""
    majors: frozenset[int]
    """Compute capabilities, the number before the point."""
    tokens_per_block: int
    """A multiple of it is needed."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: range = range(8, 257, 8)
    key_start: bool = False
    """Whether it asks for `PagedInputs.key_start`."""
    splits: Splits = _always
    """Where it is false `auto` prefers any kernel for which it is true."""


class PagedAttention:
    """Stores what is new, then lets the kernel attend."""

    graphs = True

    def __init__(self, kernel: Kernel, heads: HeadShape, store: Store) -> None:
        """Raises what `kernel.load` raises."""
        self.name = kernel.name
        self._key_start = kernel.key_start
        self._attend = kernel.load()
        self._scale = heads.scale
        self._store = store

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> PagedInputs:  # noqa: ARG002
        """See `AttentionBackend.prepare`."""
        return PagedInputs(
            slots=inputs.slots,
            block_tables=inputs.block_tables,
            query_start=inputs.query_start,
            context_lengths=inputs.context_lengths,
            generation_rows=inputs.generation_rows,
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            key_start=_key_start(inputs) if self._key_start else None,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Raises TypeError where prepare() did not come first."""
        if not isinstance(inputs, PagedInputs):
            raise TypeError("prepare() comes before attend()")
        self._store(cache, key, value, inputs.slots)
        return self._attend(query, cache, inputs, self._scale, window)


def _key_start(inputs: AttentionInputs) -> Tensor:
    if inputs.generation:
        return inputs.query_start
    return F.pad(inputs.context_lengths.cumsum(0, dtype=torch.int32), (1, 0))
