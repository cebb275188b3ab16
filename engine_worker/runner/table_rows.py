"""Gathers the rows of prompt tables that a step needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.step import Slice
from sluice.wire.tables import Image, Table, VirtualTokens

STAND_IN = 0
"""The token id that the model gets in place of a virtual token's id."""


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
    """At least one slice must have virtual tokens."""
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
