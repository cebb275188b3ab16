"""Log-probabilities of a prompt's tokens on their way through the ring: packed, since there may be many of them."""

from collections.abc import Iterator
from struct import iter_unpack

import msgspec

from sluice.ring.message import Count, Logprobs, Number

PART_ROWS = 4096
"""The most in one `PromptLogprobs`."""


def row_bytes(top: int) -> int:
    """Size of one row: float32 log-probability, uint32 rank, uint32 ids of the `top` most likely tokens, their float32
    log-probabilities; little-endian, the best first."""
    return 8 + 8 * top


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive prompt tokens, each given those before it. Row i is of the prompt's token i + 1: the first token
    has none."""

    request: Number
    attempt: Count
    start: Count
    """The first row."""
    top: Logprobs
    data: bytes
    """Rows as in `row_bytes`."""

    def __post_init__(self) -> None:
        rows, rest = divmod(len(self.data), row_bytes(self.top))
        if rest or not 0 < rows <= PART_ROWS:
            raise ValueError(f"{len(self.data)} bytes of rows of {row_bytes(self.top)} bytes, at most {PART_ROWS}")

    @property
    def rows(self) -> int:
        return len(self.data) // row_bytes(self.top)


def parts(request: int, attempt: int, start: int, top: int, data: bytes) -> Iterator[PromptLogprobs]:
    """`data`: any number of rows."""
    size = PART_ROWS * row_bytes(top)
    for at in range(0, len(data), size):
        yield PromptLogprobs(request, attempt, start + at // row_bytes(top), top, data[at : at + size])


Row = tuple[float, int, list[tuple[int, float]]]
"""Log-probability, rank (1-based), the most likely tokens with theirs, the best first."""


def unpack(data: bytes | bytearray, top: int) -> Iterator[Row]:
    for logprob, rank, *rest in iter_unpack(f"<fI{top}I{top}f", data):
        yield logprob, rank, list(zip(rest[:top], rest[top:], strict=True))
