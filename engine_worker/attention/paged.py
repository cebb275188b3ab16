"""Attention on a GPU: a kernel that reads the cache's pages in place, and the kernels' common description."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache, LayerCache


@dataclass(frozen=True, slots=True)
class PagedInputs(AttentionInputs):
    """`AttentionInputs` with what some kernels need in addition."""

    key_start: Tensor | None
    """[B + 1] int32: where each sequence's keys would begin if they were contiguous. In a generation step only its
    shape is right. None if the kernel does not need it."""


Splits = Callable[[HeadShape, tuple[int | None, ...]], bool]
"""(heads, windows of the layers) -> whether long contexts of generation rows are split over the GPU."""
Attend = Callable[[Tensor, LayerCache, PagedInputs, float, int | None], Tensor]
"""(query [T, heads, head_dim], cache, inputs, scale of the scores, window) -> the same shape as the query."""
Store = Callable[[LayerCache, Tensor, Tensor, Tensor], None]
"""(cache, key, value, slots): writes key and value [T, kv_heads, head_dim] to slots [T] int64. Slot -1 is padding:
nothing that is ever read may be written for it. Never waits for the device, so a CUDA graph can capture it."""


def _always(heads: HeadShape, windows: tuple[int | None, ...]) -> bool:  # noqa: ARG001
    return True


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that may be available, and its requirements; `engine_worker.attention.choice` checks them."""

    name: str
    """The value of the setting `attention` that selects it."""
    title: str
    load: Callable[[], Attend]
    """Raises ModuleNotFoundError or RefusedError if it is not available, other errors if it is broken."""
    majors: frozenset[int]
    """Major compute capabilities."""
    tokens_per_block: int
    """The block size must be a multiple of it."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: range = range(8, 257, 8)
    key_start: bool = False
    """Whether it needs `PagedInputs.key_start`."""
    splits: Splits = _always
    """If false, `auto` prefers any kernel for which it is true."""
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
"""Sluice's own: any block size and dtype, and no package but torch's."""


def triton_store() -> Store:
    """Writes keys and values in one launch. Raises ModuleNotFoundError without Triton."""
    from engine_worker.attention.kernels import store

    return store


class PagedAttention:
    """The backend of a kernel: stores the new keys and values, then attends."""

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
        # Kernels look at its shape only, and a graph would replay whatever values it has now.
        return inputs.query_start
    return F.pad(inputs.context_lengths.cumsum(0, dtype=torch.int32), (1, 0))
