"""One request's state: its phase, its latest attempt and its progress. Only its methods write it, as a test checks."""

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import Final

from router.requests.admission import Permit
from router.requests.attempt import Attempt, LostAttempt
from router.requests.request_phase import PREPARING, SUBMITTED, TRANSITIONS, WITHOUT_PERMIT, RequestPhase
from router.requests.suspects import Suspicion
from router.requests.token_log import RequestLog
from router.requests.trace_context import TraceContext
from router.validate.spec import Spec
from sluice.ring.params import RetentionParams, SamplingParams
from sluice.ring.rows import Started, Times
from sluice.ring.tables import NO_TABLES, PromptTables, VirtualTokens
from sluice.ring.wire import PROBATION_TOKENS

MAX_LOST_KEPT = 32
"""Lost attempts of a request that are remembered: a client that reads slowly may pause it any number of times."""
UNCONNECTED_TOKENS = 16
"""Per sequence: what an engine may draw before a new lane to its detokenizer is connected; all of it is lost if the
engine dies by then. Half a second at 30 ms per token, where connecting takes milliseconds."""


class RequestState:
    """The pipeline owns a request until its answer ends, the dispatcher until its last attempt has left the ring."""

    def __init__(self, number: int, spec: Spec, tenant: str = "", trace: TraceContext | None = None) -> None:
        self.number: Final = number
        """Its id on the ring."""
        self.spec: Final = spec
        self.tenant: Final = tenant
        """Empty: no tenant."""
        self.trace: Final = trace
        """None: it belongs to no trace."""
        self.arrived: Final = time.monotonic()
        self.log: Final = RequestLog(spec.n, spec.resume, spec.logprobs is not None)
        self.suspicion: Final = Suspicion(deaths=spec.engine_deaths)
        """Written by `Suspects` alone."""
        self.phase = RequestPhase.TOKENIZING
        self.aborted = False
        """Its client, or an admin, asked for its end."""
        self.prompt: list[int] = []
        self.tables = NO_TABLES
        """Kept for later attempts."""
        self.virtual: VirtualTokens | None = None
        """What ids of the prompt behind the vocabulary stand for."""
        self.sampling = spec.sampling
        """With the bad words, once they are tokenized."""
        self.retention = RetentionParams()
        self.max_tokens = 0
        """Settled by the first submit."""
        self.attempts = 0
        """Submitted so far, so also the number of the next one."""
        self.fruitless = 0
        """Attempts in a row that brought no token."""
        self.avoided: frozenset[int] = frozenset()
        """Epochs of peers where those attempts failed: others are preferred."""
        self.model = spec.resume_model
        """Fingerprint of the latest attempt's model; before the first one, of the model of its `resume` tokens."""
        self.submitted: float | None = None
        """When its first attempt was."""
        self._preparation: asyncio.Timeout | None = None
        self._permit: Permit | None = None
        self._attempt: Attempt | None = None
        self._ended: set[int] = set()
        self._drawn_at_death = 0
        """Tokens that engines may have drawn before they died, received or not; over all sequences."""
        self._first_tokens: float | None = None
        self._first_delta: float | None = None
        self._terminal_at: float | None = None
        self._lost: deque[LostAttempt] = deque(maxlen=MAX_LOST_KEPT)

    # What others read.

    @property
    def preparing(self) -> bool:
        """Nothing was submitted yet."""
        return self.phase in PREPARING

    @property
    def on_ring(self) -> bool:
        """An attempt was submitted and its end is awaited."""
        return self.phase in SUBMITTED

    @property
    def attempt(self) -> Attempt:
        """The latest one. Raises RuntimeError before the first."""
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
        """By which its log lines are found."""
        trace = {} if self.trace is None else {"trace_id": self.trace.hex_id}
        return {"request_id": self.spec.request_id} | trace

    @property
    def first_tokens_at(self) -> float | None:
        """When its first token came over the ring."""
        return self._first_tokens

    @property
    def terminal_at(self) -> float | None:
        """When the last row of all came over the ring."""
        return self._terminal_at

    @property
    def lost_attempts(self) -> tuple[LostAttempt, ...]:
        """The latest of them, oldest first."""
        return tuple(self._lost)

    @property
    def bound(self) -> bool:
        """It can go on with `model` only: its client knows that model, or tokens of it have come."""
        return bool(self.model) and (
            bool(self.spec.resume_model or self._ended) or self.log.start_delivered or self.log.received > 0
        )

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to its first delta; without deltas, to its first token by the engine's own times."""
        if self._first_delta is not None:
            return self._first_delta - self.arrived
        times = [sequence.end.times for sequence in self.log.sequences if sequence.end and sequence.received]
        if self.submitted is None or not times:
            return None
        return self.submitted - self.arrived + min(found.queue + found.context for found in times)

    @property
    def interval(self) -> int:
        """Tokens per row. 1 once an engine died under it: its progress must be visible token by token. And with
        tensors, whose rows wait for their tokens."""
        return 1 if self.suspicion.touched or self.spec.tensors else self.spec.text.interval

    @property
    def past_probation(self) -> bool:
        """This attempt has brought enough tokens for its engine to end a quarantine."""
        return self.log.received > self.attempt.tokens_before + PROBATION_TOKENS * self.spec.n

    @property
    def progressed(self) -> bool:
        """This attempt got further than any before it, by more than the rows that a death may have lost."""
        if self.past_probation and self.log.received > self._drawn_at_death + PROBATION_TOKENS * self.spec.n:
            return True
        # If rows join several tokens, the first one may take long: the start of the attempt counts.
        return self.interval > 1 and self.attempt.started

    def times_since_submit(self, found: Times) -> Times:
        """`found`, of the latest attempt, as times since the first submit."""
        if self.attempt.number == 0 or self.submitted is None:
            return found
        before = self.attempt.submitted - self.submitted
        if self._first_tokens is None or self._first_tokens >= self.attempt.submitted:
            # No earlier attempt brought a token: all the time before this one is waiting.
            return Times(before + found.queue, found.context, found.generation)
        # An earlier attempt did: what came after its first token is generation, this attempt's start included.
        context = self._first_tokens - self.submitted
        return Times(0.0, context, before - context + found.queue + found.context + found.generation)

    # The way to the ring.

    def begin_preparation(self) -> asyncio.Timeout:
        """The context in which to prepare it, bounded by its time limit; `interrupt_preparation` ends it early."""
        self._preparation = asyncio.timeout(self.spec.time_limit)
        return self._preparation

    def interrupt_preparation(self) -> None:
        if self._preparation is not None and not self._preparation.expired():
            self._preparation.reschedule(asyncio.get_running_loop().time())

    def on_tokenized(self, prompt: list[int], sampling: SamplingParams, retention: RetentionParams) -> None:
        self.move_to(RequestPhase.QUEUED)
        self.prompt, self.sampling, self.retention = prompt, sampling, retention
        if self.spec.prompt_logprobs is not None:
            self.log.expect_prompt_logprobs(len(prompt) - 1, self.spec.prompt_logprobs)
        if self.spec.tensors:
            self.log.expect_tensors(self.spec.tensors, len(prompt))

    def on_tables(self, tables: PromptTables, vocab_size: int) -> None:
        self.tables, self.virtual = tables, VirtualTokens.of(vocab_size, tables)

    def on_admitted(self, permit: Permit) -> None:
        """It holds `permit` from here on, and releases it when it ends or pauses."""
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
        """The engine has begun the attempt; of the first start the tenant is credited with the cached tokens."""
        # A later attempt finds the prompt cached by the first one, which has been charged for it.
        if self.attempts == 1 and self.log.started is None and self._permit is not None:
            self._permit.credit_cached(min(started.cached_tokens, len(self.prompt)))
        self._attempt = replace(self.attempt, started=True)
        self.log.start(started)

    def on_first_token(self) -> None:
        self._attempt = replace(self.attempt, has_tokens=True)
        if self._first_tokens is None:
            self._first_tokens = time.monotonic()

    def charge_output(self, tokens: int) -> None:
        if self._permit is not None:
            self._permit.charge_output(tokens)

    def on_first_delta(self) -> None:
        """A delta is about to be written; only the first counts."""
        if self._first_delta is None:
            self._first_delta = time.monotonic()

    def on_terminal(self, sequence: int) -> bool:
        """The last row of `sequence` has come over the ring; returns whether it was the request's last."""
        self._ended.add(sequence)
        if self.all_terminal:
            self._terminal_at = time.monotonic()
        return self.all_terminal

    @property
    def all_terminal(self) -> bool:
        """The last row of every sequence has come over the ring."""
        return len(self._ended) == self.spec.n

    def abort(self) -> None:
        self.aborted = True

    # Off the ring.

    def on_engine_died(self) -> None:
        """Its engine died and may have drawn tokens that never came, if rows join several or no lane was connected."""
        joined = self.interval if self.interval > 1 else 0
        unseen = joined if self.attempt.started else UNCONNECTED_TOKENS
        # Not less than after an earlier death: the attempt in between may have lost the same tokens once more.
        self._drawn_at_death = max(self._drawn_at_death, self.log.received + unseen * self.spec.n)

    def on_attempt_lost(self, reason: str, accepted: bool = True, avoid: bool = False) -> None:
        """Called before it leaves the ring. `reason`: an error code. `accepted`: its engine had taken it; `avoid`:
        prefer other peers next."""
        attempt, now = self.attempt, time.monotonic()
        peers = attempt.engine.name, attempt.detokenizer.name
        self._lost.append(LostAttempt(attempt.number, *peers, attempt.submitted, now, reason, self.log.received))
        if self.log.progress > self.attempt.progress_before:
            self.fruitless, self.avoided = 0, frozenset()
        else:
            self.fruitless += accepted
        # Those whose ends wait for rows of tensors run once more.
        self._ended.difference_update(each.index for each in self.log.sequences if each.held_end is not None)
        if avoid:
            self.avoided |= {self.attempt.engine.epoch, self.attempt.detokenizer.epoch}

    def end(self) -> None:
        """Nothing was submitted, or no attempt will follow. Idempotent."""
        if self.phase is not RequestPhase.ENDED:
            self.move_to(RequestPhase.ENDED)

    def move_to(self, phase: RequestPhase) -> None:
        """Raises RuntimeError if TRANSITIONS does not list the change: a bug in the caller."""
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"request {self.number} cannot get from {self.phase.name} to {phase.name}")
        self.phase = phase
        if phase in WITHOUT_PERMIT and self._permit is not None:
            self._permit.release()
            self._permit = None
