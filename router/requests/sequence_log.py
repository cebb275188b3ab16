"""What has been received of one sequence, and how much of it the reader has consumed."""

from array import array
from collections.abc import Sequence

from sluice.wire.rows import End, TokenLogprob


class SequenceLog:
    """All received tokens, and the text and logprobs that are not delivered yet."""

    __slots__ = (
        "accepted",
        "cumulative",
        "delivered",
        "end",
        "held_end",
        "ids",
        "index",
        "last_at",
        "logprobs",
        "received",
        "text",
    )

    def __init__(self, index: int, resumed: Sequence[int] = ()) -> None:
        """`resumed`: tokens that the client already has."""
        self.index = index
        self.ids = array("q", resumed)
        """All tokens of the continuation; cleared once the sequence has ended and was delivered."""
        self.received = len(resumed)
        """Number of tokens, including resumed ones."""
        self.delivered = len(resumed)
        """Number of tokens that the reader has consumed."""
        self.text: list[str] = []
        """Undelivered text."""
        self.logprobs: list[TokenLogprob] = []
        """Undelivered logprobs."""
        self.cumulative = 0.0
        """Sum of all logprobs."""
        self.accepted = 0
        """Number of received tokens that were accepted draft tokens."""
        self.end: End | None = None
        self.held_end: End | None = None
        """An end that arrived before the last tensor rows. It takes effect once these have arrived."""
        self.last_at: float | None = None
        """When the latest tokens arrived, by time.monotonic."""

    @property
    def undelivered_ids(self) -> "array[int]":
        return self.ids[self.delivered :]

    def drop_content(self) -> None:
        self.ids, self.text, self.logprobs = array("q"), [], []
