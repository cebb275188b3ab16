"""The requests that the engine holds: the only place where they begin and where each of their sequences ends, once."""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, abc
from collections.abc import Iterable

from engine_worker.core.deadlines import Deadlines
from engine_worker.hooks import Responses
from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.protocol import AdapterLibrary
from engine_worker.request import Request, opening, remaining
from engine_worker.sequence import IN_ORDER, Sequence, State
from engine_worker.step import Drawn, Scored
from sluice.ring.errors import Fault, FinishReason
from sluice.ring.images import Image
from sluice.ring.prompt_logprobs import parts
from sluice.ring.rows import End, TokenLogprob, TokenRow
from sluice.ring.shared_tables import SharedTables
from sluice.ring.tables import Table
from sluice.ring.tensors import TensorRows
from sluice.ring.wire import Submit


class LiveRequests:
    """`requests` by number; `active`: their sequences that compete for memory (all but awaiting ones), in order."""

    def __init__(self, cache: KvCacheManager, adapters: AdapterLibrary | None = None) -> None:
        self.requests: dict[int, Request] = {}
        self.active: list[Sequence] = []
        self.num_begun = 0
        """Requests since the start."""
        self.with_tensors: OrderedDict[Request, None] = OrderedDict()
        """Those that want some; `TensorGate` orders them and removes the ended ones."""
        self.tables: SharedTables[Table | Image] = SharedTables()
        """And images, of the requests; each request's are acquired before it begins."""
        self.ended: Counter[str] = Counter()
        """Sequences since the start, by name of the finish reason."""
        self._cache = cache
        self._adapters = adapters
        self._deadlines = Deadlines()
        self._responses = Responses()
        self._changed: dict[Request, None] = {}

    def begin(self, request: Request, now: float, *, held: bool = False) -> None:
        """Add a request whose number is not live. Resumed sequences that are complete end at once. `held`: the others
        compete for nothing until `admit`."""
        self.requests[request.spec.request] = request
        self.num_begun += 1
        if self._adapters is not None and request.adapter is not None:
            self._adapters.acquire(request.adapter)
        if request.spec.tensors:
            self.with_tensors[request] = None
        self._changed[request] = None
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
        """What a held request has waited for is there."""
        for sequence in request.awaiting():
            if sequence.output:
                self.activate(sequence)
        for computes_prompt in request.awaiting()[:1]:
            self.activate(computes_prompt)

    def refuse(self, spec: Submit, fault: Fault) -> None:
        self._responses.refused.append((spec, fault))

    def mark_scheduled(self, request: Request, cached_tokens: int, iteration: int, now: float) -> None:
        """A request's first step was scheduled, with `cached_tokens` of its prompt from the prefix cache."""
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
        spec = request.spec
        request.num_scored = scored.start + len(scored.tokens)
        self._responses.prompt_logprobs.extend(parts(spec.request, spec.attempt, scored.start, scored.top, data))

    def add_tensors(self, rows: Iterable[TensorRows]) -> None:
        self._responses.tensors.extend(rows)

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        request, output = sequence.request, sequence.output
        spec = request.spec
        if sequence.forced is not None:
            self.end_forced(sequence, now)
            return
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        request.last_token_at = now
        sequence.append(token)
        logprobs = [] if logprob is None else [logprob]
        # A cheap test first: most tokens end nothing.
        may_end = token in request.stops or len(output) >= spec.stopping.max_tokens
        if may_end and (reason := sequence.finish_reason()) is not FinishReason.RUNNING:
            self.end(sequence, reason, now, tokens=[token], logprobs=logprobs)
            return
        row = TokenRow(spec.request, spec.attempt, sequence.index, len(output) - 1, [token], logprobs, None)
        self._responses.rows.append(row)
        if sequence.state is State.AWAITING:
            self.activate(sequence)

    def end_forced(self, sequence: Sequence, now: float) -> None:
        """End a resumed sequence that was complete, once the row of tensors of its last token was kept. The receiver
        has that token."""
        sequence.append_forced()
        self.end(sequence, sequence.finish_reason(), now)

    def extend(
        self, sequence: Sequence, drawn: abc.Sequence[Drawn], accepted: int, reason: FinishReason, now: float
    ) -> None:
        """As `append`, for several tokens, which the sequence has already, `accepted` of them drafted. `reason`: why
        the last one ends it, or RUNNING."""
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        request = sequence.request
        request.last_token_at = now
        tokens = [each.token for each in drawn]
        logprobs = [each.logprob for each in drawn if each.logprob is not None]
        if reason is FinishReason.RUNNING:
            spec, offset = request.spec, len(sequence.output) - len(tokens)
            row = TokenRow(spec.request, spec.attempt, sequence.index, offset, tokens, logprobs, None, accepted)
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
        """End a sequence, with its newest `tokens` in the terminal row. No effect on an ended one."""
        if sequence.state is State.ENDED:
            return
        request = sequence.request
        if request.search is not None:
            # Without one of its beams a search would find something else.
            empty: tuple[list[int], list[TokenLogprob], FinishReason] = ([], [], reason)
            self.end_search(request, [empty] * request.spec.n, now, fault)
            return
        # Cancelled, say, before the rows of its last token came.
        sequence.append_forced()
        # A request can end before its first step; its rows need the open all the same.
        self._open(request, now)
        stop_token = sequence.output[-1] if reason is FinishReason.STOP_TOKEN else None
        end = End(reason, sequence.times(now), stop_token=stop_token, fault=fault, by_guide=by_guide)
        spec, offset = request.spec, len(sequence.output) - len(tokens or ())
        row = TokenRow(spec.request, spec.attempt, sequence.index, offset, tokens or [], logprobs or [], end, accepted)
        self._responses.rows.append(row)
        self._withdraw(sequence)
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
        """End a beam search with (tokens, their logprobs, reason) for each of the n outputs, but those that an earlier
        attempt has delivered."""
        self._open(request, now)
        spec, times = request.spec, request.sequences[0].times(now)
        for index in remaining(spec):
            tokens, logprobs, reason = results[index]
            stop_token = tokens[-1] if reason is FinishReason.STOP_TOKEN else None
            end = End(reason, times, stop_token=stop_token, fault=fault)
            # What an earlier attempt has delivered is the same.
            known = len(spec.resume.get(index, ()))
            new, their = tokens[known:], logprobs[known:]
            self._responses.rows.append(TokenRow(spec.request, spec.attempt, index, known, new, their, end))
            self.ended[reason.name] += 1
        for beam in request.sequences:
            self._withdraw(beam)
        request.num_live = 0
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """None of its sequences is live."""
        self._changed[request] = None
        del self.requests[request.spec.request]
        self.tables.release(request.spec.tables.parts)
        if self._adapters is not None and request.adapter is not None:
            self._adapters.release(request.adapter)

    def drop(self, beam: Sequence) -> None:
        """A beam that no other continues."""
        self._withdraw(beam)

    def park(self, beam: Sequence) -> None:
        """Release the memory of a beam that is not in flight; it competes for none until `activate`."""
        self._cache.release(beam)
        self._remove(beam)
        beam.state = State.AWAITING

    def release_ended(self, sequence: Sequence) -> None:
        """Release the blocks of an ended sequence, unless another in-flight step still uses them."""
        if not sequence.num_inflight:
            self._cache.release(sequence)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Have these compute their tokens again: their blocks' content was lost. No in-flight step may use them."""
        for sequence in sequences:
            if sequence.blocks:
                self._cache.release(sequence)
                sequence.state = State.WAITING

    def end_request(self, request: Request, reason: FinishReason, now: float, fault: Fault | None = None) -> None:
        # The last first: otherwise ending the one that computes the prompt would activate the next.
        for sequence in reversed(request.sequences):
            self.end(sequence, reason, now, fault=fault)

    def expire(self, now: float) -> None:
        for request in self._deadlines.pop_expired(now):
            self.end_request(request, FinishReason.TIME_LIMIT, now)

    def _open(self, request: Request, now: float) -> None:
        if not request.opened:
            request.opened = True
            self._responses.opened.append(opening(request.spec, request.cached_tokens, now - request.arrived_at))

    def activate(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        insort(self.active, sequence, key=IN_ORDER)

    def _remove(self, sequence: Sequence) -> None:
        # Orders are unique, so this is its index.
        del self.active[bisect_left(self.active, sequence.order, key=IN_ORDER)]

    def _withdraw(self, sequence: Sequence) -> None:
        was_active = sequence.state is not State.AWAITING
        if was_active:
            self._remove(sequence)
        # Blocks that in-flight steps use are released later, by `release_ended`.
        # It may hold memory elsewhere.
        sequence.program = None
        if sequence.num_inflight:
            self._cache.retire(sequence)
        else:
            self._cache.release(sequence)
        sequence.state = State.ENDED
        # If it was to compute the prompt for the others, the next of them takes over.
        if was_active and not sequence.output:
            for successor in sequence.request.awaiting()[:1]:
                self.activate(successor)
