"""The backend for GPUs: attention by a kernel that reads the cache's pages in place, and how such kernels are
described."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache


@dataclass(frozen=True, slots=True)
class PagedInputs(AttentionInputs):
    """`AttentionInputs` with an additional tensor that some kernels need."""

    key_start: Tensor | None
    """[B + 1] int32: where each sequence's keys would begin if they were contiguous. In a generation step only the
    shape of this tensor is meaningful. None if the kernel does not need it."""


Splits = Callable[[HeadShape, tuple[int | None, ...]], bool]
"""(heads, windows of the layers) -> whether long contexts of generation rows are split over the GPU."""
Attend = Callable[[Tensor, LayerCache, PagedInputs, float, int | None], Tensor]
"""(query [T, heads, head_dim], cache, inputs, scale of the scores, window) -> output, in the shape of the query."""
Store = Callable[[LayerCache, Tensor, Tensor, Tensor], None]
"""(cache, key, value, slots): writes key and value [T, kv_heads, head_dim] to slots [T] int64. For slot -1, padding, it
writes no slot that is ever read. It never waits for the device, so a CUDA graph can capture it."""


def _always(heads: HeadShape, windows: tuple[int | None, ...]) -> bool:  # noqa: ARG001
    return True


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that may be installed, and its requirements, which `engine_worker.attention.choice` checks."""

    name: str
    """The value of the setting `attention` that selects it."""
    title: str
    """Its name in messages."""
    load: Callable[[], Attend]
    """Raises ModuleNotFoundError or RefusedError if the kernel is not available, other errors if it is broken."""
    majors: frozenset[int]
    """Supported major compute capabilities."""
    tokens_per_block: int
    """The block size must be a multiple of this number."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: range = range(8, 257, 8)
    key_start: bool = False
    """Whether it needs `PagedInputs.key_start`."""
    splits: Splits = _always
    """`auto` prefers kernels for which this is true."""
    context_graphs: bool = False
    """See `AttentionBackend.context_graphs`."""


def _load_triton() -> Attend:
    from engine_worker.attention.kernels import attend

    return attend


TRITON = Kernel(
    "triton",
    "Triton",
    _load_triton,
    frozenset({8, 9, 10, 11, 12}),
    tokens_per_block=1,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dims=range(1, 257),
    context_graphs=True,
)
"""Sluice's own kernels: any block size and dtype, and no package but torch's Triton."""


def triton_store() -> Store:
    """A `Store` that writes keys and values in one launch. Raises ModuleNotFoundError if Triton is not installed."""
    from engine_worker.attention.kernels import store

    return store


class PagedAttention:
    """The backend that runs one of the kernels."""

    graphs = True

    def __init__(self, kernel: Kernel, heads: HeadShape, store: Store) -> None:
        """Raises what `kernel.load` raises."""
        self.name = kernel.name
        self.context_graphs = kernel.context_graphs
        self._key_start = kernel.key_start
        self._attend = kernel.load()
        self._scale = heads.scale
        self._store = store

    def prepare(self, inputs: AttentionInputs, cache: KVCache) -> PagedInputs:  # noqa: ARG002
        return PagedInputs(**inputs.shared(), key_start=_key_start(inputs) if self._key_start else None)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, inputs: AttentionInputs, window: int | None
    ) -> Tensor:
        if not isinstance(inputs, PagedInputs):
            raise TypeError("prepare() comes before attend()")
        self._store(cache, key, value, inputs.slots)
        return self._attend(query, cache, inputs, self._scale, window)


def _key_start(inputs: AttentionInputs) -> Tensor:
    if inputs.generation:
        # Any tensor of this shape will do: in a generation step kernels read only its shape.
        return inputs.query_start
    return F.pad(inputs.context_lengths.cumsum(0, dtype=torch.int32), (1, 0))
