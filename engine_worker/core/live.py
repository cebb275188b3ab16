"""The live requests and their deadlines. All requests begin here, and each of their sequences ends here, exactly
once."""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, abc
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from engine_worker.hooks import Responses
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.protocol import AdapterLibrary
from engine_worker.request import IN_ORDER, Request, Sequence, State
from engine_worker.step import Drawn, Scored
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.prompt_logprobs import parts
from sluice.wire.requests import Submit
from sluice.wire.rows import End, TokenLogprob, TokenRow
from sluice.wire.tables import Image, SharedTables, Table
from sluice.wire.tensors import TensorRows

PRUNE_MIN_ENTRIES = 64
"""Size below which the heap is not pruned."""


class LiveRequests:
    """Owns the live requests, the order of their sequences, and the responses of the current step."""

    def __init__(self, cache: KvCacheManager, adapters: AdapterLibrary | None = None) -> None:
        self.requests: dict[int, Request] = {}
        """By number."""
        self.active: list[Sequence] = []
        """The sequences that compete for memory, which are all but awaiting ones, in order."""
        self.num_begun = 0
        """Requests begun since the start."""
        self.with_tensors: OrderedDict[Request, None] = OrderedDict()
        """Requests with tensors; `TensorGate` orders them and removes those that have ended."""
        self.tables: SharedTables[Table | Image] = SharedTables()
        """Tables and images of the requests. Those of a request are acquired before it begins."""
        self.ended: Counter[str] = Counter()
        """Sequences ended since the start, by name of the finish reason."""
        self._cache = cache
        self._adapters = adapters
        self._deadlines = Deadlines()
        self._responses = Responses()
        self._changed: dict[Request, None] = {}

    def begin(self, request: Request, now: float, *, held: bool = False) -> None:
        """Add a request whose number is not live. Resumed sequences that are complete end immediately. `held`: the
        others stay AWAITING until `admit`."""
        self.requests[request.submit.request] = request
        self.num_begun += 1
        if self._adapters is not None and request.adapter_version is not None:
            self._adapters.acquire(request.adapter_version)
        if request.has_tensors:
            self.with_tensors[request] = None
        self._changed[request] = None
        if request.deadline != inf:
            self._deadlines.add(request)
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                if held:
                    sequence.state = State.AWAITING
                else:
                    self.activate(sequence)
            if sequence.output and (reason := sequence.finish_reason()) is not FinishReason.RUNNING:
                self.end(sequence, reason, now)

    def admit(self, request: Request) -> None:
        """Let a held request run: its preparation has ended."""
        for sequence in request.awaiting():
            if sequence.output:
                self.activate(sequence)
        for computes_prompt in request.awaiting()[:1]:
            self.activate(computes_prompt)

    def refuse(self, submit: Submit, fault: Fault) -> None:
        self._responses.refused.append((submit, fault))

    def mark_scheduled(self, request: Request, cached_tokens: int, iteration: int, now: float) -> None:
        """Record a request's first step. `cached_tokens`: prompt tokens found in the prefix cache. `iteration`: number
        of the step."""
        request.scheduled_at, request.cached_tokens, request.first_iteration = now, cached_tokens, iteration
        self._changed[request] = None
        self._open(request, now)

    def take_responses(self) -> Responses:
        responses, self._responses = self._responses, Responses()
        return responses

    def take_changed(self) -> list[Request]:
        """Requests that arrived, were first scheduled or ended since the last call."""
        if not self._changed:
            return []
        changed, self._changed = list(self._changed), {}
        return changed

    def add_prompt_logprobs(self, request: Request, scored: Scored, data: bytes) -> None:
        submit = request.submit
        request.num_scored = scored.start + len(scored.tokens)
        self._responses.prompt_logprobs.extend(parts(submit.request, submit.attempt, scored.start, scored.top, data))

    def add_tensors(self, rows: Iterable[TensorRows]) -> None:
        self._responses.tensors.extend(rows)

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Add a sampled token to a sequence and to the responses; ends the sequence if the token does."""
        request, output = sequence.request, sequence.output
        submit = request.submit
        if sequence.forced is not None:
            self.end_forced(sequence, now)
            return
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        request.last_token_at = now
        sequence.append(token)
        logprobs = [] if logprob is None else [logprob]
        # A cheap test first: most tokens do not end their sequence.
        may_end = token in request.stops or len(output) >= submit.stopping.max_tokens
        if may_end and (reason := sequence.finish_reason()) is not FinishReason.RUNNING:
            self.end(sequence, reason, now, tokens=[token], logprobs=logprobs)
            return
        row = TokenRow(submit.request, submit.attempt, sequence.index, len(output) - 1, [token], logprobs, None)
        self._responses.rows.append(row)
        if sequence.state is State.AWAITING:
            self.activate(sequence)

    def end_forced(self, sequence: Sequence, now: float) -> None:
        """End a complete resumed sequence, once the row of tensors of its last token was computed. The receiver already
        has that token."""
        sequence.append_forced()
        self.end(sequence, sequence.finish_reason(), now)

    def extend(
        self, sequence: Sequence, drawn: abc.Sequence[Drawn], accepted: int, reason: FinishReason, now: float
    ) -> None:
        """Like `append`, for several tokens, which are already in the sequence. `accepted`: how many of them were draft
        tokens. `reason`: why the last token ends the sequence, or RUNNING."""
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        request = sequence.request
        request.last_token_at = now
        tokens = [result.token for result in drawn]
        logprobs = [result.logprob for result in drawn if result.logprob is not None]
        if reason is FinishReason.RUNNING:
            submit, offset = request.submit, len(sequence.output) - len(tokens)
            row = TokenRow(submit.request, submit.attempt, sequence.index, offset, tokens, logprobs, None, accepted)
            self._responses.rows.append(row)
        else:
            self.end(sequence, reason, now, tokens, logprobs, accepted=accepted)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        fault: Fault | None = None,
        accepted: int = 0,
        by_guide: bool = False,
    ) -> None:
        """End a sequence, with its newest `tokens` in the terminal row. No effect if it has ended. Ends the whole
        request if it is a beam search."""
        if sequence.state is State.ENDED:
            return
        request = sequence.request
        if request.search is not None:
            # Without one of its beams a search would have other results.
            empty: tuple[list[int], list[TokenLogprob], FinishReason] = ([], [], reason)
            self.end_search(request, [empty] * request.submit.n, now, fault)
            return
        # Set if the sequence ends, for example by a cancel, before the row of its last token was computed.
        sequence.append_forced()
        # A request can end before its first step, but its rows must follow an Open.
        self._open(request, now)
        stop_token = sequence.output[-1] if reason is FinishReason.STOP_TOKEN else None
        end = End(reason, sequence.times(now), stop_token=stop_token, fault=fault, by_guide=by_guide)
        submit, offset = request.submit, len(sequence.output) - len(tokens or ())
        row = TokenRow(
            submit.request, submit.attempt, sequence.index, offset, tokens or [], logprobs or [], end, accepted
        )
        self._responses.rows.append(row)
        self.withdraw(sequence)
        self.ended[reason.name] += 1
        request.num_live -= 1
        if not request.num_live:
            self._forget(request)

    def end_search(
        self,
        request: Request,
        results: abc.Sequence[tuple[list[int], list[TokenLogprob], FinishReason]],
        now: float,
        fault: Fault | None = None,
    ) -> None:
        """End a beam search. `results`: (tokens, their logprobs, reason) of each of the n outputs; outputs that an
        earlier attempt has delivered are skipped."""
        self._open(request, now)
        submit, times = request.submit, request.sequences[0].times(now)
        for index in submit.remaining:
            tokens, logprobs, reason = results[index]
            stop_token = tokens[-1] if reason is FinishReason.STOP_TOKEN else None
            end = End(reason, times, stop_token=stop_token, fault=fault)
            # An earlier attempt has delivered the same tokens up to here.
            known = len(submit.resume.get(index, ()))
            new = tokens[known:], logprobs[known:]
            self._responses.rows.append(TokenRow(submit.request, submit.attempt, index, known, *new, end))
            self.ended[reason.name] += 1
        for beam in request.sequences:
            self.withdraw(beam)
        request.num_live = 0
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Remove a request all of whose sequences have ended."""
        self._changed[request] = None
        del self.requests[request.submit.request]
        if request.extras.tables is not None:
            self.tables.release(request.extras.tables.parts)
        if self._adapters is not None and request.adapter_version is not None:
            self._adapters.release(request.adapter_version)

    def park(self, sequence: Sequence) -> None:
        """Release the memory of a sequence that is not in flight; it stays AWAITING until `activate`."""
        self._cache.release(sequence)
        self._remove(sequence)
        sequence.state = State.AWAITING

    def release_ended(self, sequence: Sequence) -> None:
        """Release the blocks of an ended sequence, unless in-flight steps still use them."""
        if not sequence.num_inflight:
            self._cache.release(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks of sequences, whose content was lost, so that they compute their tokens again. No
        in-flight step may use these blocks."""
        for sequence in sequences:
            if sequence.blocks:
                self._cache.release(sequence)
                sequence.state = State.WAITING

    def end_request(self, request: Request, reason: FinishReason, now: float, fault: Fault | None = None) -> None:
        # The last first: otherwise the end of the sequence that computes the prompt would activate the next one.
        for sequence in reversed(request.sequences):
            self.end(sequence, reason, now, fault=fault)

    def expire(self, now: float) -> None:
        for request in self._deadlines.pop_expired(now):
            self.end_request(request, FinishReason.TIME_LIMIT, now)

    def _open(self, request: Request, now: float) -> None:
        if not request.opened:
            request.opened = True
            self._responses.opened.append(request.submit.opening(request.cached_tokens, now - request.arrived_at))

    def activate(self, sequence: Sequence) -> None:
        """Let an awaiting or new sequence compete for memory."""
        sequence.state = State.WAITING
        insort(self.active, sequence, key=IN_ORDER)

    def _remove(self, sequence: Sequence) -> None:
        # Orders are unique, so this is its index.
        del self.active[bisect_left(self.active, sequence.order, key=IN_ORDER)]

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence without a terminal row."""
        was_active = sequence.state is not State.AWAITING
        if was_active:
            self._remove(sequence)
        # Rules may hold memory in other processes.
        sequence.rules = None
        # Blocks that in-flight steps use are released later, by `release_ended`.
        if sequence.num_inflight:
            self._cache.retire(sequence)
        else:
            self._cache.release(sequence)
        sequence.state = State.ENDED
        # If it was to compute the prompt for its siblings, the next of them does so instead.
        if was_active and not sequence.output:
            for successor in sequence.request.awaiting()[:1]:
                self.activate(successor)


class Deadlines:
    """The requests with a time limit, by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        """Break ties between equal deadlines, because requests cannot be compared."""
        self._prune_at = PRUNE_MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """`request` must have a time limit."""
        # Requests that end early leave their entries in the heap: pruning bounds it to about twice the live requests.
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if entry[2].num_live]
            heapify(self._heap)
            self._prune_at = PRUNE_MIN_ENTRIES + 2 * len(self._heap)
        heappush(self._heap, (request.deadline, next(self._numbers), request))

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return the live requests whose deadline has passed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if request.num_live:
                expired.append(request)
        return expired
