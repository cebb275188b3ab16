"""Everything received for a request: an append-only log with one reader, the coroutine that writes the response."""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from router.errors import RequestError
from router.requests.appended import Appended
from router.requests.prompt_log import PromptLog
from router.requests.tensor_log import TensorLog
from sluice.wire.errors import FinishReason
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.rows import End, Started, TextRow, Times, TokenLogprob
from sluice.wire.tensors import TensorParams, TensorRows

NO_TIMES = Times(0.0, 0.0, 0.0)
EARLY_ENDS = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
"""Ends that do not wait for tensor rows."""


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


class RequestLog:
    """The log of all n sequences. `append` adds rows; the reader awaits `changed`, then calls `next_updated` until it
    returns None."""

    def __init__(self, n: int, resume: Mapping[int, Sequence[int]] | None = None, keep_logprobs: bool = True) -> None:
        """`resume`: tokens that the client already has, by sequence. `keep_logprobs`: keep single logprobs, not only
        their sum."""
        self.sequences = [SequenceLog(index, (resume or {}).get(index, ())) for index in range(n)]
        self.started: Started | None = None
        self.start_delivered = False
        self.prompt: PromptLog | None = None
        """The log-probabilities of the prompt, if requested."""
        self.tensors: TensorLog | None = None
        """The tensors, if any are requested."""
        self.fault: RequestError | None = None
        self.received = 0
        """Tokens of all sequences that arrived over the ring."""
        self.undelivered = 0
        """Received tokens that the reader has not consumed."""
        self._updated: OrderedDict[SequenceLog, None] = OrderedDict()
        """Sequences with something new for the reader, in order of arrival."""
        self._keep_logprobs = keep_logprobs
        self._unfinished = n
        self._reader: asyncio.Future[None] | None = None
        self._catching_up: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        return self._unfinished == 0

    @property
    def open(self) -> bool:
        """Whether the reader expects more."""
        return not (self._closed or self.complete or self.fault is not None)

    @property
    def resume(self) -> dict[int, list[int]]:
        """By sequence: the tokens after which another attempt continues."""
        return {
            sequence.index: sequence.ids.tolist()
            for sequence in self.sequences
            if sequence.end is None and sequence.ids
        }

    @property
    def live(self) -> list[int]:
        """Sequences that have not ended."""
        return [sequence.index for sequence in self.sequences if sequence.end is None]

    @property
    def ended(self) -> list[int]:
        """Sequences that have ended, so another attempt skips them."""
        return [sequence.index for sequence in self.sequences if sequence.end is not None]

    def start(self, started: Started) -> None:
        """The engine has started the request. Only the first call has an effect."""
        if self.started is None:
            self.started = started
            _wake(self._reader)

    @property
    def can_start(self) -> bool:
        """Whether the response can begin: the engine has started, and the prompt's log-probabilities, if requested,
        have arrived."""
        return self.started is not None and self.prompt_complete

    @property
    def prompt_complete(self) -> bool:
        """Whether no log-probabilities of the prompt are awaited."""
        return self.prompt is None or self.prompt.complete

    @property
    def tensor_bytes(self) -> int:
        """Size of the undelivered rows of tensors."""
        return 0 if self.tensors is None else self.tensors.nbytes

    def expect_prompt_logprobs(self, rows: int, top: int) -> None:
        self.prompt = PromptLog(rows, top)

    def expect_tensors(self, wanted: TensorParams, num_prompt: int) -> None:
        self.tensors = TensorLog(wanted, num_prompt, len(self.sequences))

    def append_tensor(self, part: TensorRows) -> Appended:
        if self.tensors is None or self._closed or self.fault is not None or self.complete:
            return Appended.SEEN
        if part.sequence >= len(self.sequences):
            return Appended.SEEN
        updated = self.sequences[part.sequence]
        # After a stop string, the engine samples more tokens until the Cancel arrives.
        if updated.end is not None and not part.context:
            return Appended.SEEN
        appended = self.tensors.append(part)
        if appended is Appended.TAKEN:
            for sequence in self.sequences if part.context else (updated,):
                self._release_end(sequence)
            self._updated[updated] = None
            _wake(self._reader)
        return appended

    @property
    def awaits_rows(self) -> bool:
        """Whether the end of a sequence is held until tensor rows arrive."""
        return self.tensors is not None and any(sequence.held_end is not None for sequence in self.sequences)

    @property
    def progress(self) -> int:
        """Number of tokens and tensor rows received so far."""
        return self.received if self.tensors is None else self.received + self.tensors.progress

    def append_prompt_logprobs(self, part: PromptLogprobs) -> Appended:
        if self._closed or self.fault is not None or self.complete:
            return Appended.SEEN
        # An engine that sends what was not requested has confused the requests.
        appended = Appended.HOLE if self.prompt is None else self.prompt.append(part)
        if self.can_start:
            _wake(self._reader)
        return appended

    def mark_start_delivered(self) -> None:
        self.start_delivered = True
        if self.prompt is not None:
            self.prompt.mark_delivered()

    def forget_start(self) -> None:
        """The attempt was lost. If it produced no token and its start was not delivered, use the next attempt's
        start."""
        if not self.received and not self.start_delivered:
            self.started = None
            if self.prompt is not None:
                self.prompt.forget()
            if self.tensors is not None:
                self.tensors.forget()

    def append(self, row: TextRow) -> Appended:
        sequence = self.sequences[row.sequence]
        # After a fault the attempt is cancelled, and the ABORTED that follows must not count as the request's end.
        if self._closed or self.fault is not None or sequence.end is not None or sequence.held_end is not None:
            return Appended.SEEN
        count = len(row.tokens)
        # A row must not precede the start, and the prompt's log-probabilities are part of the start.
        startless = self.started is None or (count > 0 and not self.prompt_complete)
        if row.offset != sequence.received or startless:
            # A row that overlaps received tokens cannot be split, because its text is not per token.
            seen = row.offset + count <= sequence.received and not startless and row.end is None
            return Appended.SEEN if seen else Appended.HOLE
        sequence.received += count
        self.received += count
        self.undelivered += count
        sequence.ids.extend(row.tokens)
        sequence.accepted += row.accepted
        if row.text:
            sequence.text.append(row.text)
        if self._keep_logprobs:
            sequence.logprobs.extend(row.logprobs)
        for logprob in row.logprobs:
            sequence.cumulative += logprob.logprob
        if row.end is not None:
            sequence.held_end = row.end
            self._release_end(sequence)
        self._updated[sequence] = None
        _wake(self._reader)
        return Appended.TAKEN

    def forget_ends(self) -> None:
        """The attempt was lost. Drop ends that are held until tensor rows arrive: the next attempt finds the same ends.
        Drop tensor rows of tokens that were not received: the next attempt may sample different ones."""
        if self.tensors is None:
            return
        for sequence in self.sequences:
            sequence.held_end = None
            if sequence.end is None:
                self.tensors.truncate(sequence.index, sequence.received)

    def next_updated(self) -> SequenceLog | None:
        """The next sequence with something new; None if the reader has consumed everything."""
        return self._updated.popitem(last=False)[0] if self._updated else None

    def mark_delivered(self, sequence: SequenceLog) -> None:
        self.undelivered -= sequence.received - sequence.delivered
        sequence.delivered = sequence.received
        sequence.text.clear()
        sequence.logprobs.clear()
        if sequence.end is not None:
            sequence.drop_content()
        _wake(self._catching_up)

    def take_tensors(self, sequence: SequenceLog) -> Iterator[TensorRows]:
        """Remove and return the rows of the prompt and of the delivered tokens."""
        if self.tensors is None:
            return
        for part in self.tensors.take(sequence.index, sequence.delivered):
            yield part
            _wake(self._catching_up)

    def reader_behind(self, tokens: int, nbytes: int) -> bool:
        """Whether the reader is writing, with more than `tokens` tokens or `nbytes` bytes of tensors undelivered."""
        # A reader that awaits `changed` has consumed all it can: the rest waits for text, not for the client.
        return self._reader is None and (self.undelivered > tokens or self.tensor_bytes > nbytes)

    def finish(self, reason: FinishReason) -> None:
        """End every live sequence: no more rows are expected."""
        for sequence in self.sequences:
            if sequence.end is None and self.open:
                self._end(sequence, End(reason, NO_TIMES))
                self._updated[sequence] = None
        _wake(self._reader)

    def fail(self, error: RequestError) -> None:
        """End the request with an error. No effect after an earlier error, or once every sequence has ended."""
        if self.open:
            self.fault = error
            _wake(self._reader)

    def close(self) -> None:
        """The reader has stopped: drop everything, and ignore what still arrives."""
        self._closed = True
        self._updated.clear()
        if self.prompt is not None:
            self.prompt.forget()
        if self.tensors is not None:
            self.tensors.clear()
        for sequence in self.sequences:
            sequence.drop_content()

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()`. Raises the request's RequestError if it fails before that."""
        while self.fault is None and not reached():
            await self.changed()
        if self.fault is not None:
            raise self.fault

    async def changed(self) -> None:
        """Wait for the next change. Must only be called after `next_updated` has returned None."""
        self._reader = asyncio.get_running_loop().create_future()
        _wake(self._catching_up)
        try:
            await self._reader
        finally:
            self._reader = None

    async def caught_up(self, tokens: int, nbytes: int) -> None:
        """Wait until at most `tokens` tokens and `nbytes` bytes of tensors are undelivered, or the reader has consumed
        all it can."""
        while self.reader_behind(tokens, nbytes):
            self._catching_up = asyncio.get_running_loop().create_future()
            try:
                await self._catching_up
            finally:
                self._catching_up = None

    def _release_end(self, sequence: SequenceLog) -> None:
        """End a sequence whose held end no longer has to wait for tensor rows."""
        end = sequence.held_end
        if end is None:
            return
        awaited = self.tensors is not None and not self.tensors.is_complete(sequence.index, sequence.received)
        if end.reason in EARLY_ENDS or not awaited:
            self._end(sequence, end)
            self._updated[sequence] = None

    def _end(self, sequence: SequenceLog, end: End) -> None:
        sequence.end, sequence.held_end = end, None
        if self.tensors is not None:
            self.tensors.truncate(sequence.index, sequence.received)
        self._unfinished -= 1


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
