"""The requests that the engine holds: the one place where they begin, and where each of their sequences ends, once."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable

from engine_worker.core.deadlines import Deadlines
from engine_worker.hooks import Opened, Refused, Responses
from engine_worker.kvcache.cache import KvCache
from engine_worker.request import IN_ORDER, Request, Sequence, State
from sluice.ring.errors import Fault, FinishReason
from sluice.ring.wire import End, Submit, TokenLogprob, TokenRow


class LiveRequests:
    """LiveRequests requests by number, and their sequences in order.

    `active` holds the sequences that compete for memory: all that live, but those that await their request's prompt.
    """

    def __init__(self, cache: KvCache) -> None:
        self.requests: dict[int, Request] = {}
        self.active: list[Sequence] = []
        self.begun = 0
        """Requests since the start."""
        self.ended: Counter[str] = Counter()
        """Sequences since the start, by the names of their finish reasons."""
        self._cache = cache
        self._deadlines = Deadlines()
        self._responses = Responses()
        self._changed: dict[Request, None] = {}

    def begin(self, request: Request, now: float) -> None:
        """Take a request in whose number is not live. Of what it resumes, that ends which is complete already."""
        self.requests[request.spec.request] = request
        self.begun += 1
        self._changed[request] = None
        self._deadlines.add(request)
        for sequence in request.sequences:
            if sequence.state is State.WAITING:
                self._activate(sequence)
        for sequence in request.sequences:
            if sequence.output and (reason := sequence.finish_reason()) is not FinishReason.RUNNING:
                self.end(sequence, reason, now)

    def refuse(self, spec: Submit, fault: Fault) -> None:
        """Answer a request that is not taken in."""
        self._responses.refused.append(Refused(spec, fault))

    def schedule(self, request: Request, cached_tokens: int, now: float) -> None:
        """The first step of a request is scheduled, with so much of its prompt from the cache."""
        request.scheduled_at, request.cached_tokens = now, cached_tokens
        self._changed[request] = None
        self._open(request, now)

    def take_responses(self) -> Responses:
        """What there is to say since the last time."""
        responses, self._responses = self._responses, Responses()
        return responses

    def take_changed(self) -> list[Request]:
        """Requests that arrived, were first scheduled or ended since the last time."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """A sequence got its next token, which may end it."""
        request, output = sequence.request, sequence.output
        spec = request.spec
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        request.last_token_at = now
        sequence.append(token)
        logprobs = [] if logprob is None else [logprob]
        if token in request.stops or len(output) >= spec.stopping.max_tokens:
            reason = sequence.finish_reason()
            if reason is not FinishReason.RUNNING:
                self.end(sequence, reason, now, tokens=[token], logprobs=logprobs)
                return
        row = TokenRow(spec.request, spec.attempt, sequence.index, len(output) - 1, [token], logprobs, None)
        self._responses.rows.append(row)
        if sequence.state is State.AWAITING:
            self._activate(sequence)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        fault: Fault | None = None,
    ) -> None:
        """End a sequence, its newest `tokens` in the same row. An ended one is left alone.

        Its blocks go back, if need be as soon as no step in flight uses them.
        """
        if sequence.state is State.ENDED:
            return
        request = sequence.request
        self._open(request, now)
        stop_token = sequence.output[-1] if reason is FinishReason.STOP_TOKEN else None
        end = End(reason, sequence.times(now), stop_token=stop_token, fault=fault)
        spec, offset = request.spec, len(sequence.output) - len(tokens or ())
        row = TokenRow(spec.request, spec.attempt, sequence.index, offset, tokens or [], logprobs or [], end)
        self._responses.rows.append(row)
        self._withdraw(sequence)
        self.ended[reason.name] += 1
        request.num_live -= 1
        if not request.num_live:
            self._changed[request] = None
            del self.requests[request.spec.request]

    def leave(self, sequence: Sequence) -> None:
        """A step of an ended sequence is through. With the last of them its blocks go back."""
        if not sequence.num_inflight:
            self._cache.release(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """What these ran on was lost, and no step in flight uses it: those that hold blocks compute their tokens again.

        It is no pause: they give way to nobody.
        """
        for sequence in sequences:
            if sequence.blocks:
                self._cache.release(sequence)
                sequence.state = State.WAITING

    def end_request(self, request: Request, reason: FinishReason, now: float, fault: Fault | None = None) -> None:
        """End all its sequences, the last first, so that none takes the prompt over from one before it."""
        for sequence in reversed(request.sequences):
            self.end(sequence, reason, now, fault=fault)

    def expire(self, now: float) -> None:
        """End the requests whose time limit was reached."""
        for request in self._deadlines.reached(now):
            self.end_request(request, FinishReason.TIME_LIMIT, now)

    def _open(self, request: Request, now: float) -> None:
        """Its stream, with its first step or where one of its sequences ends before that."""
        if not request.opened:
            request.opened = True
            self._responses.opened.append(Opened(request.spec, request.cached_tokens, now - request.arrived_at))

    def _activate(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        insort(self.active, sequence, key=IN_ORDER)

    def _withdraw(self, sequence: Sequence) -> None:
        """Out of memory and out of line. If it was to compute the prompt for others, the next of them does."""
        computes_prompt = sequence.state is not State.AWAITING and not sequence.output
        if sequence.state is not State.AWAITING:
            del self.active[bisect_left(self.active, sequence.order, key=IN_ORDER)]
        if sequence.num_inflight:
            self._cache.retire(sequence)
        else:
            self._cache.release(sequence)
        sequence.state = State.ENDED
        if computes_prompt:
            for heir in sequence.request.awaiting()[:1]:
                self._activate(heir)
