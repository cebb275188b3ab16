"""The state of one request: its phase, the legal changes of phase, its latest attempt and its progress. Only the
methods of `RequestState` write it; a test checks that."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from router.parse.model import Began
from router.parse.spec import Spec
from router.peers.kv_groups import NOWHERE, KvSite
from router.requests.admission import Permit
from router.requests.attempt import Attempt, LostAttempt
from router.requests.part import Part
from router.requests.suspects import Suspicion
from router.requests.token_log import RequestLog
from router.requests.trace_context import TraceContext
from sluice.wire.hashing import Domain
from sluice.wire.params import RetentionParams, SamplingParams
from sluice.wire.requests import PROBATION_TOKENS
from sluice.wire.rows import Started, Times
from sluice.wire.tables import PromptTables, VirtualTokens

MAX_LOST_KEPT = 32
"""Lost attempts that are remembered per request: a slow client may cause any number of pauses."""
UNCONNECTED_TOKENS = 16
"""Tokens per sequence that an engine may sample before a new lane to its detokenizer is connected. All of them are lost
if the engine dies before that. Half a second at 30 ms per token; connecting takes milliseconds."""


class RequestPhase(Enum):
    """Phases from a request's arrival to the end of its last attempt. The value describes the phase."""

    TOKENIZING = "the prompt is being tokenized"
    QUEUED = "the request waits for a permit"
    PLACING = "the request waits for peers that can accept its first attempt"
    ON_RING = "an attempt is running"
    CANCELLING = "a Cancel was sent for the attempt, and its terminal rows are awaited"
    RECOVERING = "the attempt was lost or handed over, and the request waits for peers that can accept the next one"
    PAUSED = "the client reads too slowly: no attempt and no permit until it has caught up"
    ENDED = "no attempt is running, and none will follow"


P = RequestPhase
PREPARING = frozenset({P.TOKENIZING, P.QUEUED, P.PLACING})
SUBMITTED = frozenset({P.ON_RING, P.CANCELLING})
WITHOUT_PERMIT = frozenset({P.PAUSED, P.ENDED})

TRANSITIONS: Mapping[P, Mapping[P, str]] = {
    P.TOKENIZING: {P.QUEUED: "prompt tokenized", P.ENDED: "refused or stopped"},
    P.QUEUED: {P.PLACING: "permit granted", P.ENDED: "refused or stopped"},
    P.PLACING: {P.ON_RING: "submitted", P.ENDED: "no peers, or stopped"},
    P.ON_RING: {
        P.CANCELLING: "stopped",
        P.RECOVERING: "attempt lost, or handed over",
        P.PAUSED: "client too slow",
        P.ENDED: "last terminal row, or attempt lost beyond recovery",
    },
    P.CANCELLING: {P.ENDED: "last terminal row, or attempt lost"},
    P.RECOVERING: {P.ON_RING: "submitted again", P.ENDED: "no peers, or stopped"},
    P.PAUSED: {P.RECOVERING: "client caught up, permit granted", P.ENDED: "stopped"},
    P.ENDED: {},
}
"""Every legal transition, with its cause. "Stopped" means by an abort, a client that disconnected, the time limit, or a
draining router. The diagram in docs/architecture.md is generated from this table."""


class RequestState:
    """The pipeline owns a request until its response ends, the dispatcher until its last attempt has left the ring."""

    def __init__(
        self,
        number: int,
        spec: Spec,
        tenant: str = "",
        trace: TraceContext | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.number: Final = number
        """The request's id on the ring."""
        self.spec: Final = spec
        self.parts: Final = parts
        """What it asks of optional features."""
        self.needs: Final = (*(need for part in parts for need in part.needs()),)
        """What not every engine offers."""
        self.offers_needed: Final = frozenset(need.offer for need in self.needs)
        self.versions: Final = {name: version for part in parts for name, version in part.versions().items()}
        """Fields of `Began`."""
        self.domain: Final = Domain(spec.salt, self.versions.get("adapter", ""))
        self.own_bytes: Final = sum(part.own_bytes for part in parts)
        """Bytes of prompt tables and images that the request itself contains, not of a prompt adapter that it names."""
        self.shared_tables: Final = tuple(table for part in parts for table in part.shared_tables)
        self.tenant: Final = tenant
        """Empty if there is no tenant."""
        self.trace: Final = trace
        """The trace that the request belongs to, if any."""
        self.arrived: Final = time.monotonic()
        self.log: Final = RequestLog(spec.n, spec.resume, spec.logprobs is not None)
        self.suspicion: Final = Suspicion(deaths=spec.engine_deaths)
        """Written only by `Suspects`."""
        self.phase = RequestPhase.TOKENIZING
        self.aborted = False
        """Whether the client or an admin has aborted the request."""
        self.prompt: list[int] = []
        self.tables: PromptTables | None = None
        """Kept for later attempts."""
        self.virtual: VirtualTokens | None = None
        """The rows of embeddings that the prompt's ids beyond the vocabulary stand for."""
        self.sampling = spec.sampling
        """Includes what features add, once the prompt is tokenized."""
        self.retention = RetentionParams()
        self.max_tokens = 0
        """Set before the first submission."""
        self.attempts = 0
        """Number of attempts so far, which is also the number of the next one."""
        self.fruitless = 0
        """Number of successive attempts without a token."""
        self.avoided: frozenset[int] = frozenset()
        """Epochs of the peers where these attempts failed. Other peers are preferred."""
        self.model = spec.resume_model
        """Fingerprint of the latest attempt's model; before the first attempt, of the model that generated the `resume`
        tokens."""
        self.submitted: float | None = None
        """Time of the first submission."""
        self.first_tokens_at: float | None = None
        """When the request's first token arrived over the ring."""
        self.terminal_at: float | None = None
        """When the last row of all sequences arrived over the ring."""
        self.computed_at = NOWHERE
        """Where the latest engine that has computed the prompt has its blocks."""
        self.recomputed_tokens = 0
        """Prompt tokens that later attempts have computed, because their engines had no copy of them."""
        self.prefill_engine: str | None = None
        """Name of the engine that has computed the prompt and handed over."""
        self._preparation: asyncio.Timeout | None = None
        self._permit: Permit | None = None
        self._attempt: Attempt | None = None
        self._ended: set[int] = set()
        """Sequences whose terminal row has arrived."""
        self.handed_over: set[int] = set()
        """Those of them that the next attempt continues."""
        self._queue_before: float | None = None
        """Seconds from the first submission to the first step of the attempt that handed over."""
        self._sampled_at_death = 0
        """Tokens, of all sequences, that engines may have sampled before they died, received or not."""
        self._first_delta: float | None = None
        self._lost: deque[LostAttempt] = deque(maxlen=MAX_LOST_KEPT)

    # Properties.

    @property
    def preparing(self) -> bool:
        """Whether nothing has been submitted yet."""
        return self.phase in PREPARING

    @property
    def on_ring(self) -> bool:
        """Whether an attempt was submitted and its end is awaited."""
        return self.phase in SUBMITTED

    @property
    def attempt(self) -> Attempt:
        """The latest attempt. Raises RuntimeError before the first one."""
        if self._attempt is None:
            raise RuntimeError(f"request {self.number} was never submitted")
        return self._attempt

    @property
    def engine(self) -> str | None:
        return self._attempt.engine.name if self._attempt else None

    @property
    def detokenizer(self) -> str | None:
        return self._attempt.detokenizer.name if self._attempt else None

    @property
    def log_ids(self) -> dict[str, str]:
        """Fields that identify the request in log lines."""
        trace = {} if self.trace is None else {"trace_id": self.trace.hex_id}
        return {"request_id": self.spec.request_id} | trace

    @property
    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """The latest lost attempts, oldest first."""
        return tuple(self._lost)

    @property
    def began(self) -> Began:
        """The model and adapters with which the request began."""
        return Began(self.model, **self.versions)

    @property
    def bound(self) -> bool:
        """Whether the request can only continue with `model`: the client knows its name, or tokens have arrived."""
        return bool(self.model) and (
            bool(self.spec.resume_model or self._ended) or self.log.start_delivered or self.log.received > 0
        )

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the request's arrival to its first delta; without deltas, to its first token by the engine's
        times. May be read in any thread."""
        # Each value is read once, because the event loop may change it.
        first_delta, submitted = self._first_delta, self.submitted
        if first_delta is not None:
            return first_delta - self.arrived
        ends = [end for sequence in self.log.sequences if (end := sequence.end) and sequence.received]
        if submitted is None or not ends:
            return None
        return submitted - self.arrived + min(end.times.queue + end.times.context for end in ends)

    @property
    def interval(self) -> int:
        """Tokens per row. 1 after an engine died under the request, so that progress is visible token by token; also
        with tensors, whose rows wait for their tokens."""
        return 1 if self.suspicion.touched or self.log.tensors is not None else self.spec.text.interval

    @property
    def past_probation(self) -> bool:
        """Whether this attempt has produced enough tokens for its engine to end a quarantine."""
        return self.log.received > self.attempt.tokens_before + PROBATION_TOKENS * self.spec.n

    @property
    def progressed(self) -> bool:
        """Whether this attempt got further than any earlier one, by more than the rows that a death may have lost."""
        if self.past_probation and self.log.received > self._sampled_at_death + PROBATION_TOKENS * self.spec.n:
            return True
        # If a row joins several tokens, the first row may take long, so the start of the attempt counts as progress.
        return self.interval > 1 and self.attempt.started

    def times_since_submit(self, times: Times) -> Times:
        """Convert `times`, which belong to the latest attempt, to times since the first submission."""
        if self.attempt.number == 0 or self.submitted is None:
            return times
        earlier = self.attempt.submitted - self.submitted
        if self.first_tokens_at is None or self.first_tokens_at >= self.attempt.submitted:
            # No earlier attempt produced a token, so all the time before this one counts as queueing.
            return Times(earlier + times.queue, times.context, times.generation)
        # All time after the first token of an earlier attempt counts as generation, including this attempt's start.
        first = self.first_tokens_at - self.submitted
        queue = 0.0 if self._queue_before is None else min(self._queue_before, first)
        return Times(queue, first - queue, earlier - first + times.queue + times.context + times.generation)

    # Before the first submission.

    def begin_preparation(self) -> asyncio.Timeout:
        """A context for the preparation, limited by the request's time limit. `interrupt_preparation` ends it early."""
        self._preparation = asyncio.timeout(self.spec.time_limit)
        return self._preparation

    def interrupt_preparation(self) -> None:
        if self.preparing and self._preparation is not None and not self._preparation.expired():
            self._preparation.reschedule(asyncio.get_running_loop().time())

    def on_tokenized(self, prompt: list[int], sampling: SamplingParams, retention: RetentionParams) -> None:
        """Raises RequestError if a part does not fit the prompt."""
        self.move_to(RequestPhase.QUEUED)
        self.prompt, self.sampling, self.retention = prompt, sampling, retention
        for part in self.parts:
            part.prepare(len(prompt), self.log)

    def submitted_parts(self) -> dict[str, Any]:
        """The fields of `Extras` that optional features set for the next attempt."""
        return {name: value for part in self.parts for name, value in part.submitted(self.log).items()}

    def on_tables(self, tables: PromptTables, vocab_size: int) -> None:
        self.tables, self.virtual = tables, VirtualTokens.of(vocab_size, tables)

    def on_admitted(self, permit: Permit) -> None:
        """The request holds `permit` from now on, and releases it when it ends or pauses."""
        paused = self.phase is RequestPhase.PAUSED
        self.move_to(RequestPhase.RECOVERING if paused else RequestPhase.PLACING)
        self._permit = permit

    def settle_max_tokens(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def on_submitted(self, attempt: Attempt) -> None:
        self.move_to(RequestPhase.ON_RING)
        self._attempt = attempt
        self.attempts += 1
        if self.submitted is None:
            self.submitted = attempt.submitted
        if attempt.engine.heartbeat is not None:
            self.model = attempt.engine.heartbeat.fingerprint

    # On the ring.

    def on_started(self, started: Started) -> None:
        """The engine has started the attempt. On the first start, cached tokens are refunded to the tenant."""
        if self.log.started is not None and not self.attempt.started:
            self.recomputed_tokens += max(0, len(self.prompt) - started.cached_tokens)
        # Later attempts get no refund: they find the prompt cached because the first attempt has computed it.
        if self.attempts == 1 and self.log.started is None and self._permit is not None:
            self._permit.credit_cached(min(started.cached_tokens, len(self.prompt)))
        self._attempt = replace(self.attempt, started=True)
        self.log.start(started)

    def on_first_token(self) -> None:
        self._attempt = replace(self.attempt, has_tokens=True)
        if self.attempt.engine.heartbeat is not None:
            self.computed_at = KvSite.of(self.attempt.engine.heartbeat)
        if self.first_tokens_at is None:
            self.first_tokens_at = time.monotonic()

    def charge_output(self, tokens: int) -> None:
        if self._permit is not None:
            self._permit.charge_output(tokens)

    def on_first_delta(self) -> None:
        """A delta is about to be written. Only the first call has an effect."""
        if self._first_delta is None:
            self._first_delta = time.monotonic()

    def on_terminal(self, sequence: int) -> bool:
        """The last row of `sequence` has arrived over the ring. Returns whether all sequences have ended."""
        self._ended.add(sequence)
        if self.all_terminal:
            self.terminal_at = time.monotonic()
        return self.all_terminal

    def on_handed_over(self, sequence: int, times: Times) -> None:
        """The attempt has ended `sequence`, which the next attempt continues. Call `on_terminal` next."""
        self.handed_over.add(sequence)
        self.prefill_engine = self.engine
        self._queue_before = self.times_since_submit(times).queue

    @property
    def all_terminal(self) -> bool:
        """Whether the last row of every sequence has arrived over the ring."""
        return len(self._ended) == self.spec.n

    def abort(self) -> None:
        self.aborted = True

    # Off the ring.

    def on_engine_died(self) -> None:
        """The request's engine died. It may have sampled tokens that were never received, if rows join several tokens
        or no lane to the detokenizer was connected."""
        joined = self.interval if self.interval > 1 else 0
        unseen = joined if self.attempt.started else UNCONNECTED_TOKENS
        # Never decrease: the attempt in between may have lost the same tokens again.
        self._sampled_at_death = max(self._sampled_at_death, self.log.received + unseen * self.spec.n)

    def on_attempt_lost(self, reason: str, accepted: bool = True, avoid: bool = False) -> None:
        """Must be called before the request leaves the ring. `reason`: see `LostAttempt`. `accepted`: the engine had
        accepted the attempt. `avoid`: prefer other peers for the next attempt."""
        attempt, now = self.attempt, time.monotonic()
        peers = attempt.engine.name, attempt.detokenizer.name
        self._lost.append(LostAttempt(attempt.number, *peers, attempt.submitted, now, reason, self.log.received))
        if self.log.progress > self.attempt.progress_before:
            self.fruitless, self.avoided = 0, frozenset()
        else:
            self.fruitless += accepted
        self.terminal_at = None
        self._ended -= self.handed_over
        self.handed_over.clear()
        # Sequences whose ends are held until tensor rows arrive run again.
        self._ended.difference_update(
            sequence.index for sequence in self.log.sequences if sequence.held_end is not None
        )
        if avoid:
            self.avoided |= {self.attempt.engine.epoch, self.attempt.detokenizer.epoch}

    def end(self) -> None:
        """End a request of which no attempt is running. Idempotent."""
        if self.phase is not RequestPhase.ENDED:
            self.move_to(RequestPhase.ENDED)

    def move_to(self, phase: RequestPhase) -> None:
        """Raises RuntimeError if TRANSITIONS does not list the change, which would be a bug in the caller."""
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"request {self.number} cannot change from {self.phase.name} to {phase.name}")
        self.phase = phase
        if phase in WITHOUT_PERMIT and self._permit is not None:
            self._permit.release()
            self._permit = None
