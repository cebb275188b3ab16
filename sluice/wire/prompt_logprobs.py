"""Log-probabilities of a prompt's tokens on the ring, in a packed format since there may be many."""

from collections.abc import Iterator
from struct import iter_unpack

import msgspec

from sluice.wire.message import Count, Logprobs, Number

PART_ROWS = 4096
"""Maximum number of rows in one `PromptLogprobs`."""


def row_bytes(top: int) -> int:
    """Size of one row in bytes, little-endian.

    A row contains a float32 log-probability, a uint32 rank, and of the `top` most likely tokens, best first, the uint32
    ids and the float32 log-probabilities.
    """
    return 8 + 8 * top


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens, each given the tokens before it.

    Row i belongs to the prompt's token i + 1, because the first token has no log-probability.
    """

    request: Number
    attempt: Count
    start: Count
    """Number of the first row."""
    top: Logprobs
    data: bytes
    """The rows, in the format of `row_bytes`."""

    def __post_init__(self) -> None:
        rows, rest = divmod(len(self.data), row_bytes(self.top))
        if rest or not 0 < rows <= PART_ROWS:
            raise ValueError(
                f"data must have 1 to {PART_ROWS} rows of {row_bytes(self.top)} bytes (got {len(self.data)} bytes)"
            )

    @property
    def rows(self) -> int:
        return len(self.data) // row_bytes(self.top)


def parts(request: int, attempt: int, start: int, top: int, data: bytes) -> Iterator[PromptLogprobs]:
    """Split any number of rows in `data` into messages of bounded size."""
    size = PART_ROWS * row_bytes(top)
    for at in range(0, len(data), size):
        yield PromptLogprobs(request, attempt, start + at // row_bytes(top), top, data[at : at + size])


Row = tuple[float, int, list[tuple[int, float]]]
"""Log-probability, rank (1-based), and the most likely tokens with their log-probabilities, best first."""


def unpack(data: bytes | bytearray, top: int) -> Iterator[Row]:
    for logprob, rank, *rest in iter_unpack(f"<fI{top}I{top}f", data):
        yield logprob, rank, list(zip(rest[:top], rest[top:], strict=True))
