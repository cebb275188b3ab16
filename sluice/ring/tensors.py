"""Tensors of the model for clients: rows by position, from an engine straight to a router.

They have a lane of their own, so that text never waits for them. Row i of an output is what its token i was drawn from:
the model's result at the position before it. So the last position of the prompt has row 0 of every output, and a row of
the prompt too.
"""

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.ring.message import MAX_SEQUENCES, Count, Index, Message, Name, Number

CONTEXT_LOGITS = "context_logits"
GENERATION_LOGITS = "generation_logits"
LOGITS_NAMES = (CONTEXT_LOGITS, GENERATION_LOGITS)
"""Tensors with names of their own in the API; both are the model's logits."""
HIDDEN_STATES = "hidden_states"
LAYER_PREFIX = "layers."
"""layers.N: the residual stream after layer N, counted from 0."""
PART_BYTES = 1 << 20
"""The most in one `TensorRows` of several rows."""
MAX_NAMES = 16
"""Tensors in a request."""

DType = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES + len(LOGITS_NAMES))]
Shape = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8)]


class TensorParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors that a request wants, and what its caller has of them."""

    context: Names = ()
    """Of the prompt's positions."""
    output: Names = ()
    """Of the outputs' tokens."""
    context_rows: Count = 0
    """Rows that have come, of every tensor of the prompt."""
    output_rows: dict[Index, Count] = {}
    """The same of every tensor of an output, by sequence."""

    def __bool__(self) -> bool:
        return bool(self.context or self.output)


NO_TENSORS = TensorParams()


class TensorRows(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one tensor."""

    request: Number
    attempt: Count
    sequence: Index
    """0 with `context`."""
    name: Name
    context: bool
    """Rows are the prompt's positions; else the output's tokens."""
    start: Count
    """The first row."""
    shape: Shape
    """Rows, then the tensor's own dimensions."""
    dtype: DType
    data: memoryview
    """Row-major, little-endian."""

    def __post_init__(self) -> None:
        size = prod(self.shape) * BYTES[self.dtype]
        if not self.shape[0] or len(self.data) != size:
            raise ValueError(f"{len(self.data)} bytes of {self.dtype} for the shape {self.shape}")

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + self.shape[0]

    def between(self, start: int, end: int) -> "TensorRows":
        """The rows start to end - 1, which it must have; shares the memory."""
        if start == self.start and end == self.end:
            return self
        size = len(self.data) // self.rows
        data = memoryview(self.data)[(start - self.start) * size : (end - self.start) * size]
        return msgspec.structs.replace(self, start=start, shape=(end - start, *self.shape[1:]), data=data)

    def parts(self) -> Iterator["TensorRows"]:
        """The same in messages of bounded size, but at least one row in each."""
        step = max(1, PART_BYTES // max(1, len(self.data) // self.rows))
        for start in range(self.start, self.end, step):
            yield self.between(start, min(start + step, self.end))


class TensorBatch(Message, frozen=True):
    """engine → router, on a lane of its own."""

    engine: Name
    engine_epoch: Number
    parts: Annotated[list[TensorRows], Meta(max_length=16 * MAX_SEQUENCES)]
