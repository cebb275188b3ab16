"""Rows of tokens and of text, one per sequence and step, and the batches that contain them as columns.

Every row has (request, attempt, sequence, offset). Column lengths are checked when a batch is decoded, so readers can
rely on them.
"""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sluice.wire.errors import Fault, FinishReason
from sluice.wire.message import Count, Finite, Index, Message, Name, Number, Sequences, TokenId
from sluice.wire.params import TextParams
from sluice.wire.prompt_logprobs import PromptLogprobs

MAX_TEXT_ROWS = 1 << 14
"""Rows of a text batch, which a router handles in one go."""
MAX_TEXT_TOKENS = 1 << 21
TextColumn = Annotated[list[Count], Meta(max_length=MAX_TEXT_ROWS)]
MAX_ROWS = 1 << 18
"""Rows and opened streams of a token batch."""
PROMPT_END_TOKENS = 16
"""Tokens of the prompt from which a detokenizer learns how the output's text begins. A character has at most four."""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """The start of a stream. Sent with or before its first row, once its first step is scheduled or it is refused."""

    request: Number
    attempt: Count
    n: Sequences
    text: TextParams
    router: Name
    prompt_tokens: Count
    cached_tokens: Count
    queue: Finite = 0.0
    """Seconds before the first step. Becomes `Times.queue` if the detokenizer ends the stream."""
    resume: dict[Index, list[TokenId]] = {}
    """See `Submit`."""
    ended: list[Index] = []
    """See `Submit`."""
    prompt_end: Annotated[list[TokenId], Meta(max_length=PROMPT_END_TOKENS)] = []
    """The last tokens of the prompt, which decide whether the output's text begins with a space."""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The part of `Open` that the detokenizer forwards to the router."""

    request: Number
    attempt: Count
    prompt_tokens: Count
    cached_tokens: Count


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a chosen token: natural logarithm, before temperature, penalties and filters."""

    logprob: float
    rank: Count
    """1-based."""
    top: list[tuple[TokenId, float]]
    """The most likely tokens with their log-probabilities, best first."""


class Times(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a sequence's phases in seconds, by the engine's clock."""

    queue: Finite
    context: Finite
    generation: Finite


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of a sequence. Exactly the last row of a sequence has one."""

    reason: FinishReason
    times: Times
    stop_token: TokenId | None = None
    stop_string: str | None = None
    fault: Fault | None = None
    """Only with ERROR."""
    held: str = ""
    """Text that was held back, such as a partial stop string.

    It is shown only with an end that no token caused, because a resumed attempt may continue with other text.
    """
    by_guide: bool = False
    """With EOS: whether the guide, which allows no further token, caused the end instead of a token."""


class TokenRow(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence in a step: one row of a `TokenBatch`.

    Not tracked by the garbage collector, because there is one row per token.
    """

    request: int
    attempt: int
    sequence: int
    offset: int
    """Index of the first token in the output."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One per token, or empty."""
    end: End | None
    accepted: int = 0
    """Number of tokens that are accepted draft tokens."""


class TextRow(NamedTuple):
    """One row of a `TextBatch`. `text` may lag behind the tokens by incomplete characters or partial stop strings."""

    request: int
    attempt: int
    sequence: int
    offset: int
    tokens: list[int]
    logprobs: list[TokenLogprob]
    text: str
    end: End | None
    accepted: int = 0
    """See `TokenRow`."""


class TokenBatch(Message, frozen=True):
    """engine → detokenizer: the rows of one step, or of several if the lane was full."""

    engine: Name
    engine_epoch: Number
    opens: Annotated[list[Open], Meta(max_length=MAX_ROWS)]
    request: Annotated[list[Number], Meta(max_length=MAX_ROWS)]
    attempt: list[Count]
    sequence: list[Index]
    offset: list[Count]
    count: list[Count]
    tokens: list[TokenId]
    logprobs: dict[Count, list[TokenLogprob]]
    """By row index, for rows of requests that asked for logprobs."""
    ends: dict[Count, End]
    """By row index."""
    accepted: dict[Count, Count] = {}
    """By row index, for rows with accepted draft tokens."""
    prompt_logprobs: list[PromptLogprobs] = []
    """Sent before the rows of their requests, so that a receiver of tokens has them already."""

    def __post_init__(self) -> None:
        _check_columns(self)

    @classmethod
    def of(
        cls,
        engine: str,
        engine_epoch: int,
        opens: list[Open],
        rows: list[TokenRow],
        prompt_logprobs: list[PromptLogprobs] | None = None,
    ) -> "TokenBatch":
        return cls(
            engine,
            engine_epoch,
            opens,
            request=[row.request for row in rows],
            attempt=[row.attempt for row in rows],
            sequence=[row.sequence for row in rows],
            offset=[row.offset for row in rows],
            count=[len(row.tokens) for row in rows],
            tokens=[token for row in rows for token in row.tokens],
            logprobs={i: row.logprobs for i, row in enumerate(rows) if row.logprobs},
            ends={i: row.end for i, row in enumerate(rows) if row.end is not None},
            accepted={i: row.accepted for i, row in enumerate(rows) if row.accepted},
            prompt_logprobs=prompt_logprobs or [],
        )


class TextBatch(Message, frozen=True):
    """detokenizer → router: the rows of several streams."""

    detokenizer: Name
    started: Annotated[list[Started], Meta(max_length=MAX_TEXT_ROWS)]
    request: Annotated[list[Number], Meta(max_length=MAX_TEXT_ROWS)]
    attempt: TextColumn
    sequence: Annotated[list[Index], Meta(max_length=MAX_TEXT_ROWS)]
    offset: TextColumn
    count: TextColumn
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TEXT_TOKENS)]
    logprobs: dict[Count, list[TokenLogprob]]
    ends: Annotated[dict[Count, End], Meta(max_length=MAX_TEXT_ROWS)]
    text: Annotated[list[str], Meta(max_length=MAX_TEXT_ROWS)]
    accepted: Annotated[dict[Count, Count], Meta(max_length=MAX_TEXT_ROWS)] = {}
    prompt_logprobs: Annotated[list[PromptLogprobs], Meta(max_length=MAX_TEXT_ROWS)] = []
    """See `TokenBatch`."""
    epoch: Number = 0
    """Epoch of the detokenizer, which only the routers know to which it sends heartbeats."""

    def __post_init__(self) -> None:
        _check_columns(self)
        if len(self.text) != len(self.request):
            raise ValueError(f"text has {len(self.text)} rows, request has {len(self.request)}")

    def rows(self) -> Iterator[TextRow]:
        start = 0
        for i, count in enumerate(self.count):
            yield TextRow(
                self.request[i],
                self.attempt[i],
                self.sequence[i],
                self.offset[i],
                self.tokens[start : start + count],
                self.logprobs.get(i, []),
                self.text[i],
                self.ends.get(i),
                self.accepted.get(i, 0),
            )
            start += count


def _check_columns(batch: TokenBatch | TextBatch) -> None:
    size = len(batch.request)
    for name in ("attempt", "sequence", "offset", "count"):
        if len(getattr(batch, name)) != size:
            raise ValueError(f"{name} has {len(getattr(batch, name))} rows, request has {size}")
    # Counts with a correct sum could still include a negative one.
    if min(batch.count, default=0) < 0 or sum(batch.count) != len(batch.tokens):
        raise ValueError(f"{len(batch.tokens)} tokens for counts that sum to {sum(batch.count)}")
    for rows in (batch.logprobs, batch.ends, batch.accepted):
        if any(not 0 <= row < size for row in rows):
            raise ValueError(f"a row index is outside 0..{size - 1}")
    for row, logprobs in batch.logprobs.items():
        if len(logprobs) != batch.count[row]:
            raise ValueError(f"row {row} has {len(logprobs)} logprobs for {batch.count[row]} tokens")
