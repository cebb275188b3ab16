"""The rows of prompt tables that a step needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.step import Slice
from sluice.ring.images import Image
from sluice.ring.tables import Table, VirtualTokens

STAND_IN = 0
"""The id that the model gets in place of a virtual token's."""


class TableRows(NamedTuple):
    tokens: NDArray[np.int64]
    """[V]: the virtual tokens of a step, by index."""
    rows: NDArray[np.float32]
    """[V, hidden]."""


def with_images(slices: Sequence[Slice], rows_of: Callable[[Image], Table]) -> tuple[Slice, ...]:
    """Slices with tables in place of the images that they need."""
    return tuple(
        part
        if part.virtual is None
        else msgspec.structs.replace(part, virtual=part.virtual.computed(part.tokens, rows_of))
        for part in slices
    )


def table_rows(slices: Sequence[Slice]) -> TableRows | None:
    """None if the step has no virtual tokens."""
    # Few operations per slice, for every step asks.
    virtual = [part.virtual for part in slices]
    if not any(virtual):
        return None
    tokens, rows, end = [], [], 0
    for part in slices:
        start, end = end, end + len(part.tokens)
        if part.virtual is not None:
            ids = np.fromiter(part.tokens, np.int64, end - start) - part.virtual.vocab_size
            places = np.flatnonzero(ids >= 0)
            tokens.append(places + start)
            rows.append(_rows(part.virtual, ids[places]))
    return TableRows(np.concatenate(tokens), np.concatenate(rows))


def _rows(virtual: VirtualTokens, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """`numbers` [V]: of rows, in all tables joined."""
    tables = [(table, first) for table, first in virtual.placed if isinstance(table, Table)]
    found = np.empty((len(numbers), tables[0][0].hidden_size), np.float32)
    for table, first in tables:
        own = (numbers >= first) & (numbers < first + table.rows)
        if own.any():
            found[own] = _floats(table, numbers[own] - first)
    return found


def _floats(table: Table, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    kind = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[table.dtype]
    found = np.frombuffer(table.data, kind).reshape(table.rows, table.hidden_size)[rows]
    if table.dtype == "bfloat16":
        # The upper half of a float32.
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32, copy=False)
