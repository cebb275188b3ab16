"""Tensors of the model for clients, which an engine sends row by row directly to a router.

They have a separate lane, so that text never waits for them. Row i of an output is the model's result from which token
i was sampled, which is the result at the preceding position. Therefore the last position of the prompt has row 0 of
every output, and also a row of the prompt.
"""

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.wire.message import MAX_SEQUENCES, Count, Index, Message, Name, Number

CONTEXT_LOGITS = "context_logits"
GENERATION_LOGITS = "generation_logits"
LOGITS_NAMES = (CONTEXT_LOGITS, GENERATION_LOGITS)
"""Tensors that have special fields in the API. Both are the model's logits."""
HIDDEN_STATES = "hidden_states"
LAYER_PREFIX = "layers."
"""layers.N is the residual stream after layer N, counted from 0."""
PART_BYTES = 1 << 20
"""Maximum size of a `TensorRows` with several rows."""
MAX_NAMES = 16
"""Maximum number of tensors in a request."""

DType = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES + len(LOGITS_NAMES))]
Shape = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8)]


class TensorParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors that a request asks for, and the rows that its caller has received already."""

    context: Names = ()
    """Names of the tensors of the prompt's positions."""
    output: Names = ()
    """Names of the tensors of the outputs' tokens."""
    context_rows: Count = 0
    """Number of received rows of every tensor of the prompt."""
    output_rows: dict[Index, Count] = {}
    """Number of received rows of every tensor of an output, by sequence."""

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
    """Whether the rows belong to the prompt's positions instead of the output's tokens."""
    start: Count
    """Number of the first row."""
    shape: Shape
    """The number of rows, then the dimensions of one row."""
    dtype: DType
    data: memoryview
    """Row-major, little-endian."""

    def __post_init__(self) -> None:
        size = prod(self.shape) * BYTES[self.dtype]
        if not self.shape[0] or len(self.data) != size:
            raise ValueError(
                f"rows of shape {self.shape} and dtype {self.dtype} must have {size} bytes (got {len(self.data)})"
            )

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def end(self) -> int:
        """Number of the row after the last one."""
        return self.start + self.shape[0]

    def between(self, start: int, end: int) -> "TensorRows":
        """The rows start to end - 1, which must exist, as a view of the data."""
        if start == self.start and end == self.end:
            return self
        size = len(self.data) // self.rows
        data = memoryview(self.data)[(start - self.start) * size : (end - self.start) * size]
        return msgspec.structs.replace(self, start=start, shape=(end - start, *self.shape[1:]), data=data)

    def parts(self) -> Iterator["TensorRows"]:
        """The rows in parts of at most PART_BYTES, but at least one row each."""
        step = max(1, PART_BYTES // max(1, len(self.data) // self.rows))
        for start in range(self.start, self.end, step):
            yield self.between(start, min(start + step, self.end))


class TensorBatch(Message, frozen=True):
    """engine → router, on a separate lane."""

    engine: Name
    engine_epoch: Number
    parts: Annotated[list[TensorRows], Meta(max_length=16 * MAX_SEQUENCES)]
