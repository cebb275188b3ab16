"""What has come of a request: an append-only log with one reader, the coroutine of the answer."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from router.errors import RequestError
from router.requests.appended import Appended
from router.requests.prompt_log import PromptLog
from router.requests.sequence_log import SequenceLog
from router.requests.tensor_log import TensorLog
from sluice.ring.errors import FinishReason
from sluice.ring.prompt_logprobs import PromptLogprobs
from sluice.ring.rows import End, Started, TextRow, Times
from sluice.ring.tensors import TensorParams, TensorRows

NO_TIMES = Times(0.0, 0.0, 0.0)
EARLY_ENDS = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
"""Ends that do not wait for rows of tensors."""


class RequestLog:
    """All n sequences. Rows come in by `append`; the reader awaits `changed` and takes `next_updated` until None."""

    def __init__(self, n: int, resume: Mapping[int, Sequence[int]] | None = None, keep_logprobs: bool = True) -> None:
        """`resume`: tokens that the client has already, by sequence. `keep_logprobs`: not only their sum."""
        self.sequences = [SequenceLog(index, (resume or {}).get(index, ())) for index in range(n)]
        self.started: Started | None = None
        self.start_delivered = False
        self.prompt = PromptLog()
        self.tensors = TensorLog()
        self.fault: RequestError | None = None
        self.received = 0
        """Tokens of all sequences that came over the ring."""
        self.undelivered = 0
        """Of those, what the reader has not taken."""
        self._updated: OrderedDict[SequenceLog, None] = OrderedDict()
        """Sequences with something new, in the order in which it came."""
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
        """The reader waits for more."""
        return not (self._closed or self.complete or self.fault is not None)

    @property
    def resume(self) -> dict[int, list[int]]:
        """The tokens after which another attempt continues, by sequence."""
        return {each.index: each.ids.tolist() for each in self.sequences if each.end is None and each.ids}

    @property
    def live(self) -> list[int]:
        """Sequences that have no end."""
        return [sequence.index for sequence in self.sequences if sequence.end is None]

    @property
    def ended(self) -> list[int]:
        """Sequences that another attempt leaves out."""
        return [sequence.index for sequence in self.sequences if sequence.end is not None]

    def start(self, started: Started) -> None:
        """The engine has begun; only the first start counts."""
        if self.started is None:
            self.started = started
            _wake(self._reader)

    @property
    def can_start(self) -> bool:
        """Whether the answer can begin: the engine has, and has sent the prompt's log-probabilities if asked for."""
        return self.started is not None and self.prompt.complete

    def expect_prompt_logprobs(self, rows: int, top: int) -> None:
        self.prompt = PromptLog(rows, top)

    def expect_tensors(self, wanted: TensorParams, num_prompt: int) -> None:
        self.tensors = TensorLog(wanted, num_prompt, len(self.sequences))

    def append_tensor(self, part: TensorRows) -> Appended:
        if self._closed or self.fault is not None or self.complete or part.sequence >= len(self.sequences):
            return Appended.SEEN
        own = self.sequences[part.sequence]
        # After a stop string its engine draws more, until the cancel arrives.
        if own.end is not None and not part.context:
            return Appended.SEEN
        appended = self.tensors.append(part)
        if appended is Appended.TAKEN:
            for sequence in self.sequences if part.context else (own,):
                self._release_end(sequence)
            self._updated[own] = None
            _wake(self._reader)
        return appended

    @property
    def awaits_rows(self) -> bool:
        """Whether an end waits for rows of tensors."""
        return bool(self.tensors) and any(sequence.held_end is not None for sequence in self.sequences)

    @property
    def progress(self) -> int:
        """Grows with everything that attempts bring."""
        return self.received + self.tensors.progress

    def append_prompt_logprobs(self, part: PromptLogprobs) -> Appended:
        if self._closed or self.fault is not None or self.complete:
            return Appended.SEEN
        appended = self.prompt.append(part)
        if self.can_start:
            _wake(self._reader)
        return appended

    def mark_start_delivered(self) -> None:
        self.start_delivered = True
        self.prompt.mark_delivered()

    def forget_start(self) -> None:
        """The attempt that began has brought nothing: the next one's start counts, unless the client has it."""
        if not self.received and not self.start_delivered:
            self.started = None
            self.prompt.forget()
            self.tensors.forget()

    def append(self, row: TextRow) -> Appended:
        sequence = self.sequences[row.sequence]
        # After a fault we cancel the attempt: the ABORTED that follows must not look like the request's own end.
        if self._closed or self.fault is not None or sequence.end is not None or sequence.held_end is not None:
            return Appended.SEEN
        count = len(row.tokens)
        # Nor before the start, of which the log-probabilities of the prompt are a part.
        startless = self.started is None or (count > 0 and not self.prompt.complete)
        if row.offset != sequence.received or startless:
            # A row that overlaps what has come cannot be cut: its text is not per token.
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
        """The attempt was lost whose ends wait for rows of tensors: the next one finds the same ends. Rows of tokens
        that did not come are dropped: it may draw others."""
        for sequence in self.sequences if self.tensors else ():
            sequence.held_end = None
            if sequence.end is None:
                self.tensors.truncate(sequence.index, sequence.received)

    def next_updated(self) -> SequenceLog | None:
        """The next sequence that has something new; None if the reader has seen everything."""
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
        """Rows of the prompt, and of those tokens that the reader has taken."""
        for part in self.tensors.take(sequence.index, sequence.delivered):
            yield part
            _wake(self._catching_up)

    def reader_behind(self, tokens: int, nbytes: int) -> bool:
        """Whether more tokens than this, or more bytes of tensors, wait while the reader is in a write."""
        # A reader that awaits `changed` has taken all that can be shown: the rest waits for text, not for the client.
        return self._reader is None and (self.undelivered > tokens or self.tensors.nbytes > nbytes)

    def finish(self, reason: FinishReason) -> None:
        """End every sequence that has no end: no more rows are awaited."""
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
        """The reader has gone: keep nothing more."""
        self._closed = True
        self._updated.clear()
        self.prompt.forget()
        self.tensors.clear()
        for sequence in self.sequences:
            sequence.drop_content()

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        """Raises the request's RequestError if it fails before."""
        while self.fault is None and not reached():
            await self.changed()
        if self.fault is not None:
            raise self.fault

    async def changed(self) -> None:
        """Wait for the next change. Call it only after `next_updated` has returned None."""
        self._reader = asyncio.get_running_loop().create_future()
        _wake(self._catching_up)
        try:
            await self._reader
        finally:
            self._reader = None

    async def caught_up(self, tokens: int, nbytes: int) -> None:
        """Wait until at most so many tokens and bytes of tensors wait for the reader, or it has taken all that can be
        shown yet."""
        while self.reader_behind(tokens, nbytes):
            self._catching_up = asyncio.get_running_loop().create_future()
            try:
                await self._catching_up
            finally:
                self._catching_up = None

    def _release_end(self, sequence: SequenceLog) -> None:
        """Its end counts, if it has one and nothing is missing."""
        end = sequence.held_end
        if end is None:
            return
        if end.reason in EARLY_ENDS or self.tensors.is_complete(sequence.index, sequence.received):
            self._end(sequence, end)
            self._updated[sequence] = None

    def _end(self, sequence: SequenceLog, end: End) -> None:
        sequence.end, sequence.held_end = end, None
        if self.tensors:
            self.tensors.truncate(sequence.index, sequence.received)
        self._unfinished -= 1


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
