"""What has come of one sequence, and what of it the reader has not taken yet."""

from array import array
from collections.abc import Sequence

from sluice.ring.rows import End, TokenLogprob


class SequenceLog:
    """Every token received, and the text and logprobs that are not delivered."""

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
        """`resumed`: tokens that the client has already."""
        self.index = index
        self.ids = array("q", resumed)
        """Every token of the continuation; emptied once it has ended and was delivered."""
        self.received = len(resumed)
        self.delivered = len(resumed)
        """Of those, how many the reader has taken."""
        self.text: list[str] = []
        """Undelivered, as the logprobs."""
        self.logprobs: list[TokenLogprob] = []
        self.cumulative = 0.0
        """Sum of all logprobs."""
        self.accepted = 0
        """Of the tokens that came, how many were drafted."""
        self.end: End | None = None
        self.held_end: End | None = None
        """An end that has come before the last rows of tensors: it counts once these have."""
        self.last_at: float | None = None
        """When its latest tokens came, on time.monotonic's clock."""

    @property
    def undelivered_ids(self) -> "array[int]":
        return self.ids[self.delivered :]

    def drop_content(self) -> None:
        self.ids, self.text, self.logprobs = array("q"), [], []
