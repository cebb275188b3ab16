"""Requests between two attempts: they wait for peers that can continue them, or for their own slow client."""

import asyncio
import time
from random import random

import structlog

from router.errors import RequestError
from router.peers.membership import Membership
from router.requests.admission import Admission
from router.requests.attempt_sender import AttemptSender
from router.requests.registry import RequestCounters
from router.requests.request_state import RequestPhase, RequestState
from router.requests.suspects import Suspects
from sluice.settings.router import RecoverySettings
from sluice.wire.errors import ErrorCode, FinishReason

RETRY_SECONDS = 0.02
"""Interval between two attempts to find a peer with room."""
FIRST_BACKOFF_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 1.0

RECOVERABLE = frozenset(
    {
        ErrorCode.ENGINE_LOST,
        ErrorCode.DETOKENIZER_LOST,
        ErrorCode.ROWS_LOST,
        ErrorCode.DRAINING,
        ErrorCode.OVERLOADED,
        ErrorCode.STEP_FAILED,
        ErrorCode.QUARANTINE,
        ErrorCode.ADAPTER_MISSING,
    }
)
AVOID_PEERS = frozenset({ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.STEP_FAILED})
"""Errors after which to avoid the same peers. Lost rows are not among them: the same engine still has the prefix
cached."""


class Recovery:
    """Runs one task for each request that is between two attempts."""

    def __init__(
        self,
        attempts: AttemptSender,
        membership: Membership,
        admission: Admission,
        settings: RecoverySettings,
        suspects: Suspects,
        counters: RequestCounters,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._attempts = attempts
        self._membership = membership
        self._admission = admission
        self._settings = settings
        self._suspects = suspects
        self._counters = counters
        self._log = log
        self._tasks: dict[RequestState, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    @property
    def waiting(self) -> int:
        return len(self._tasks)

    def recover(self, request: RequestState, error: RequestError) -> bool:
        """Give up the attempt on the ring. Returns whether another one will follow, once peers can accept it."""
        refused = error.code is ErrorCode.QUARANTINE
        if refused:
            # Place no other request there until the engine's next heartbeat, which reports the quarantine too.
            request.attempt.engine.refuses = True
        avoid = error.code in AVOID_PEERS or (error.code is ErrorCode.ADAPTER_MISSING and not _supply(request))
        request.on_attempt_lost(error.code.name, accepted=not refused, avoid=avoid)
        unfinished = request.log.open and not request.aborted
        if not unfinished or error.code not in RECOVERABLE or request.fruitless >= self._settings.recovery_attempts:
            self._attempts.give_up(request, RequestPhase.ENDED)
            return False
        self._attempts.give_up(request, RequestPhase.RECOVERING)
        # A paused request does not count as waiting: it waits for its client and needs no engine.
        self._suspects.wait(request.suspicion)
        self._begin(request, error)
        return True

    def hand_over(self, request: RequestState) -> bool:
        """The attempt on the ring has computed what it should. Returns whether another one follows, on another engine:
        not if its first token was the last one, or if the request was stopped meanwhile."""
        continues = bool(request.handed_over) and request.log.open and not request.aborted
        self._counters.handovers["continued" if continues else "ended"] += 1
        # Neither a Cancel nor a Drop: engine and detokenizer have ended the attempt themselves.
        if not continues:
            self._attempts.leave_ring(request, RequestPhase.ENDED)
            return False
        request.on_attempt_lost(FinishReason.HANDED_OVER.name)
        self._attempts.leave_ring(request, RequestPhase.RECOVERING)
        self._suspects.wait(request.suspicion)
        self._start(request, RequestError(ErrorCode.NO_ENGINE, f"{request.engine} has computed the prompt"))
        return True

    def too_slow(self, request: RequestState) -> bool:
        """Whether so much is undelivered that the request should pause."""
        settings = self._settings
        if not request.spec.streaming:
            return False
        # Beyond twice the limit, pause even if the client keeps up: tensors may be waiting for a slow detokenizer.
        return request.log.tensor_bytes > 2 * settings.max_undelivered_bytes or request.log.reader_behind(
            settings.max_undelivered_tokens, settings.max_undelivered_bytes
        )

    def pause(self, request: RequestState) -> None:
        """Give up the attempt and release the permit until the client has read enough."""
        request.on_attempt_lost(ErrorCode.SLOW_CLIENT.name)
        self._attempts.give_up(request, RequestPhase.PAUSED)
        log = request.log
        message = f"{log.undelivered} tokens and {log.tensor_bytes} bytes of tensors are waiting for the client"
        self._begin(request, RequestError(ErrorCode.SLOW_CLIENT, message))

    def cancel(self, request: RequestState) -> None:
        """Cancel the request's next attempt, if one was to follow."""
        self._suspects.stop_waiting(request.suspicion)
        task = self._tasks.pop(request, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for request in list(self._tasks):
            self.cancel(request)

    def _begin(self, request: RequestState, error: RequestError) -> None:
        self._counters.recoveries[error.code.name] += 1
        self._log.info(
            "attempt_given_up",
            **request.log_ids,
            attempt=request.attempt.number,
            reason=error.code.name,
            message=error.message,
            received_tokens=request.log.received,
            engine=request.engine,
            detokenizer=request.detokenizer,
        )
        if request.attempt.hands_over:
            self._counters.handovers["lost"] += 1
        self._start(request, error)

    def _start(self, request: RequestState, error: RequestError) -> None:
        """Look for peers for the next attempt. `error`: the request's error if there are none."""
        self._tasks[request] = asyncio.get_running_loop().create_task(self._run(request, error))

    async def _run(self, request: RequestState, error: RequestError) -> None:
        limit = request.spec.time_limit
        # The time limit counts from the request's arrival, not from this attempt.
        remaining = None if limit is None else max(0.0, request.arrived + limit - time.monotonic())
        try:
            async with asyncio.timeout(remaining):
                await self._resubmit(request, error)
        except TimeoutError:
            request.log.finish(FinishReason.TIME_LIMIT)
            request.end()
        except RequestError as failure:
            request.log.fail(failure)
            request.end()
        except Exception:  # noqa: BLE001 - an unexpected error ends this request only
            self._log.exception("recovery_failed", **request.log_ids)
            request.log.fail(RequestError(ErrorCode.INTERNAL, "internal error; see the server's log"))
            request.end()
        finally:
            # The new attempt may be lost before this task is done, so a newer task of this request may exist.
            if self._tasks.get(request) is asyncio.current_task():
                del self._tasks[request]
                self._suspects.stop_waiting(request.suspicion)

    async def _resubmit(self, request: RequestState, error: RequestError) -> None:
        if request.phase is RequestPhase.PAUSED:
            settings = self._settings
            await request.log.caught_up(settings.max_undelivered_tokens // 2, settings.max_undelivered_bytes // 2)
            # Must not be refused. No context tokens: the tenant was charged for them with the first permit.
            permit = await self._admission.acquire(request.spec.priority, 0, request.tenant, refusable=False)
            request.on_admitted(permit)
        await asyncio.sleep(_backoff(request.fruitless))
        try:
            async with asyncio.timeout(self._settings.recovery_timeout):
                while not await self._try(request):
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            # After a pause the client has caught up and only a peer is missing, so the error must not blame the client.
            code = ErrorCode.NO_ENGINE if error.code is ErrorCode.SLOW_CLIENT else error.code
            seconds = self._settings.recovery_timeout
            message = f"{error.message}; no engine and detokenizer could continue it within {seconds:g} s"
            raise RequestError(code, message) from None

    async def _try(self, request: RequestState) -> bool:
        await self._membership.ready.wait()
        async with self._turn:
            # One request at a time, yielding in between: the loss of a peer starts many recoveries simultaneously.
            await asyncio.sleep(0)
            return self._attempts.try_submit(request)


def _supply(request: RequestState) -> bool:
    """Send what the request's engine reported as missing. False if it is not available here."""
    return any(part.supply(request.attempt.engine) for part in request.parts)


def _backoff(fruitless: int) -> float:
    """Random delay in seconds after this many successive attempts without a token; 0 after the first."""
    if fruitless < 2:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(fruitless - 2, 16)) * (0.5 + random() / 2)
