"""A step's slices as arrays, from which torch computes on every rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.backend import AttentionInputs
from engine_worker.models.model import Embeds
from engine_worker.positions import AXES
from engine_worker.step import Slice
from sluice.wire.tables import Image, Table, VirtualTokens
from sluice.wire.tensors import LAYER_PREFIX

# Bytes. Triton compiles a separate variant of a kernel for addresses that are not a multiple of 16.
ALIGNED = 16
STAND_IN = 0
"""The token id that the model gets in place of a virtual token's id."""
Tree = TypeVar("Tree", bound=tuple[Any, ...])
DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float64", "float32", "bool")}


@dataclass(frozen=True, slots=True)
class StepArrays:
    """T tokens of B slices; plain data that can be sent to other ranks. Fields without a docstring are those of
    `AttentionInputs`."""

    token_ids: NDArray[np.int64]
    """[T]. Arbitrary where the previous step still has to sample the token; see `follow_tokens`."""
    positions: NDArray[np.int64]
    """[T], or [3, T] if some are rows of images in grids: what the rotary embedding gets."""
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    last_tokens: NDArray[np.int64] | None
    """[R]: the tokens whose logits are sampled from; None: all."""
    kept_tokens: NDArray[np.int64] | None
    """[K]: the tokens whose rows are requested in addition to those of the draws (`Slice.rows`); None: no token."""
    keeps_layers: bool
    """Whether output layers are among the rows that are kept."""
    follow_tokens: NDArray[np.int64]
    """[F]: indices of the tokens that the previous step samples."""
    follow_draws: NDArray[np.int64]
    """[F]: the draws of the previous step that sample these tokens."""
    generation_rows: int
    max_query: int
    max_context: int
    adapters: NDArray[np.int64] | None = None
    """[B]: number of each slice's LoRA adapter, or 0; None: no slice has one."""
    virtual_tokens: NDArray[np.int64] | None = None
    """[V]: the tokens that are rows of prompt tables; None: there are no virtual tokens."""
    virtual_rows: NDArray[np.float32] | None = None
    """[V, hidden]. None on ranks other than 0, which receive the rows by broadcast."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """`StepArrays` on a device, of the same shapes and types."""

    token_ids: Tensor
    """Complete only after `follow`."""
    positions: Tensor
    attention: AttentionInputs
    last_tokens: Tensor | None
    kept_tokens: Tensor | None
    follow_tokens: Tensor
    follow_draws: Tensor
    embeds: Embeds | None = None

    @classmethod
    def of(cls, arrays: StepArrays, device: torch.device) -> "StepTensors":
        tokens = (arrays.token_ids, arrays.positions, arrays.follow_tokens, arrays.follow_draws)
        layout = (arrays.slots, arrays.block_tables, arrays.query_start, arrays.context_lengths)
        rows = [array for array in (arrays.last_tokens, arrays.kept_tokens) if array is not None]
        token_ids, positions, follow_tokens, follow_draws, *rest = arrays_to_device([*tokens, *layout, *rows], device)
        slots, tables, query_start, lengths, *rest = rest
        last, kept = (None if array is None else rest.pop(0) for array in (arrays.last_tokens, arrays.kept_tokens))
        attention = AttentionInputs(
            slots, tables, query_start, lengths, arrays.generation_rows, arrays.max_query, arrays.max_context
        )
        return cls(token_ids, positions, attention, last, kept, follow_tokens, follow_draws)

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step sampled: `sampled` [D] int64."""
        if len(self.follow_tokens):
            self.token_ids.index_copy_(0, self.follow_tokens, sampled.index_select(0, self.follow_draws))


class TableRows(NamedTuple):
    tokens: NDArray[np.int64]
    """[V]: indices of the virtual tokens in the step."""
    rows: NDArray[np.float32]
    """[V, hidden]."""


def with_images(slices: Sequence[Slice], rows_of: Callable[[Image], Table]) -> tuple[Slice, ...]:
    """The slices, with tables in place of the images that their tokens address."""
    return tuple(
        part
        if part.virtual is None
        else msgspec.structs.replace(part, virtual=part.virtual.computed(part.tokens, rows_of))
        for part in slices
    )


def table_rows(slices: Sequence[Slice]) -> TableRows:
    """The virtual tokens of a step, and their rows. At least one slice must have virtual tokens."""
    tokens, rows, end = [], [], 0
    for part in slices:
        start, end = end, end + len(part.tokens)
        if part.virtual is not None:
            ids = np.fromiter(part.tokens, np.int64, end - start) - part.virtual.vocab_size
            indices = np.flatnonzero(ids >= 0)
            tokens.append(indices + start)
            rows.append(_rows(part.virtual, ids[indices]))
    return TableRows(np.concatenate(tokens), np.concatenate(rows))


def _rows(virtual: VirtualTokens, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """[V, hidden]. `numbers` [V]: row numbers in the concatenation of all tables."""
    tables = [(table, first) for table, first in virtual.placed if isinstance(table, Table)]
    rows = np.empty((len(numbers), tables[0][0].hidden_size), np.float32)
    for table, first in tables:
        inside = (numbers >= first) & (numbers < first + table.rows)
        if inside.any():
            rows[inside] = _floats(table, numbers[inside] - first)
    return rows


def _floats(table: Table, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[table.dtype]
    values = np.frombuffer(table.data, dtype).reshape(table.rows, table.hidden_size)[rows]
    if table.dtype == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def build_arrays(
    slices: Sequence[Slice], tokens_per_block: int, window: int | None, *, axes: bool = False
) -> StepArrays:
    """Block tables start with the first block of `window`, the widest one of any layer, so that blocks behind it cost
    nothing. `axes`: see `Model.has_axes`."""
    size = len(slices)
    counts = np.fromiter((len(part.tokens) for part in slices), np.int64, size)
    starts = np.fromiter((part.start for part in slices), np.int64, size)
    skipped = np.zeros(size, np.int64) if window is None else np.maximum(starts - window + 1, 0) // tokens_per_block
    ends = np.cumsum(counts)
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(part.tokens for part in slices), np.int64, total)
    virtual = table_rows(slices) if any(part.virtual is not None for part in slices) else None
    if virtual is not None:
        token_ids[virtual.tokens] = STAND_IN
    # In most steps each slice has one token, and nothing has to be repeated.
    positions = starts if total == size else np.arange(total) + np.repeat(starts - ends + counts, counts)
    rows = np.arange(size) if total == size else np.repeat(np.arange(size), counts)
    # For attention a sequence starts at the first block in its table; positions count from its actual start.
    lengths = starts + counts - skipped * tokens_per_block
    block_tables = _padded([part.block_table for part in slices], skipped, -(-lengths // tokens_per_block))
    slots = block_tables[rows, positions // tokens_per_block - skipped[rows]].astype(np.int64)
    slots = slots * tokens_per_block + positions % tokens_per_block

    last_tokens = [
        token
        for end, part in zip(ends.tolist(), slices, strict=True)
        if part.draws
        for token in range(end - 1 - part.drafts, end)
    ]
    kept_tokens = [
        np.arange(rows.start, rows.stop) + end - len(part.tokens)
        for part, end in zip(slices, ends.tolist(), strict=True)
        if part.scored is not None or part.kept
        for rows in part.rows
    ]
    follow_tokens, follow_draws = _follows(slices, ends)
    return StepArrays(
        token_ids,
        rotary_positions(slices, positions) if axes else positions,
        slots,
        block_tables,
        query_start=np.concatenate(([0], ends)).astype(np.int32),
        context_lengths=lengths.astype(np.int32),
        # None saves the gather in a common step, where every token is sampled from.
        last_tokens=None if len(last_tokens) == total else np.array(last_tokens, np.int64),
        kept_tokens=np.concatenate(kept_tokens) if kept_tokens else None,
        keeps_layers=bool(kept_tokens) and _keeps_layers(slices),
        follow_tokens=follow_tokens,
        follow_draws=follow_draws,
        generation_rows=int(np.logical_and.accumulate(counts == 1).sum()),
        max_query=int(counts.max()),
        max_context=int(lengths.max()),
        adapters=adapter_numbers(slices),
        virtual_tokens=None if virtual is None else virtual.tokens,
        virtual_rows=None if virtual is None else virtual.rows,
    )


def rotary_positions(slices: Sequence[Slice], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T], or [3, T] if some tokens are rows of images in grids. `indexes` [T]: index of each token in its sequence."""
    all_positions = [part.positions for part in slices]
    if not any(all_positions):
        return indexes
    rotary, end = np.tile(indexes, (AXES, 1)), 0
    grids = False
    for part, positions in zip(slices, all_positions, strict=True):
        start, end = end, end + len(part.tokens)
        if positions is None:
            continue
        offset = positions.behind(part.start)
        if offset is None:
            rotary[:, start:end] = positions.between(part.start, part.start + len(part.tokens))
            grids = True
        else:
            rotary[:, start:end] += offset
    return rotary if grids else rotary[0]


def adapter_numbers(slices: Sequence[Slice]) -> NDArray[np.int64] | None:
    """See `StepArrays.adapters`."""
    numbers = [part.adapter_slot for part in slices]
    return np.array(numbers, np.int64) if any(numbers) else None


def _keeps_layers(slices: Sequence[Slice]) -> bool:
    return any(name.startswith(LAYER_PREFIX) for part in slices for kept in part.kept for name in kept.names)


def _follows(slices: Sequence[Slice], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that the previous step samples, and its draws; see `StepArrays.follow_tokens`."""
    following = [(i, part.follows) for i, part in enumerate(slices) if part.follows is not None]
    if not following:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, draws = (np.array(column, np.int64) for column in zip(*following, strict=True))
    return ends[rows] - 1, draws


def _padded(tables: list[Sequence[int]], skipped: NDArray[np.int64], used: NDArray[np.int64]) -> NDArray[np.int32]:
    """Each table's `used` blocks after the first `skipped`, padded with zeros to [B, M]."""
    out = np.zeros((len(tables), int(used.max())), np.int32)
    inside = np.arange(out.shape[1]) < used[:, None]
    parts = zip(tables, skipped.tolist(), used.tolist(), strict=True)
    blocks = chain.from_iterable(table[first : first + count] for table, first, count in parts)
    out[inside] = np.fromiter(blocks, np.int32, int(used.sum()))
    return out


def to_device(tree: Tree, device: torch.device) -> Tree:
    """A tree of (named) tuples with its CPU tensors copied to the device, as by `arrays_to_device`."""
    if device.type == "cpu":
        return tree
    sent = iter(arrays_to_device([tensor.numpy() for tensor in _tensors(tree)], device))
    return map_tensors(tree, lambda _: next(sent))


def arrays_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors. On a CPU they share the arrays' memory. To CUDA they are copied together, asynchronously;
    work that is queued later on the same stream waits for the copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    # Dropping the pinned buffer here is safe: torch's allocator reuses it only after the copy is done.
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray[Any]], *, pinned: bool = False) -> Tensor:
    """All arrays in one buffer: [bytes] uint8."""
    starts = _starts(arrays)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays, starts, strict=False):
        buffer.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of a packed buffer, on any device, with the dtypes and shapes of `arrays`."""
    return [
        buffer[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return list(accumulate((-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays), initial=0))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _tensors(part)


def map_tensors(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """A tree of (named) tuples with the function's result in place of each tensor."""
    mapped: Tree = _mapped(tree, function)
    return mapped


def _mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if not isinstance(tree, tuple):
        return tree
    parts = [_mapped(part, function) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
