"""From one attempt to the next: a request that lost its attempt waits for peers, or for its own slow client."""

import asyncio
import time
from random import random

import structlog

from router.errors import RequestError
from router.peers.adapters import Adapters
from router.peers.membership import Membership
from router.requests.admission import Admission
from router.requests.attempt_sender import AttemptSender
from router.requests.registry import RequestCounters
from router.requests.request_phase import RequestPhase
from router.requests.request_state import RequestState
from router.requests.suspects import Suspects
from sluice.ring.errors import ErrorCode, FinishReason
from sluice.settings.router import RecoverySettings

RETRY_SECONDS = 0.02
"""Between two searches for a peer with room."""
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
"""Errors after which to avoid the same peers. Not after lost rows: the same engine still has the prefix cached."""


class Recovery:
    """Has one task for each request between two attempts."""

    def __init__(
        self,
        attempts: AttemptSender,
        membership: Membership,
        admission: Admission,
        adapters: Adapters,
        settings: RecoverySettings,
        suspects: Suspects,
        counters: RequestCounters,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._attempts = attempts
        self._membership = membership
        self._admission = admission
        self._adapters = adapters
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
        """Give up the attempt on the ring; whether another one follows, as soon as peers can take it."""
        refused = error.code is ErrorCode.QUARANTINE
        if refused:
            # Its heartbeats report the quarantine too; until the next one arrives, place no other request there.
            request.attempt.engine.refuses = True
        avoid = error.code in AVOID_PEERS or (error.code is ErrorCode.ADAPTER_MISSING and not self._supply(request))
        request.on_attempt_lost(error.code.name, accepted=not refused, avoid=avoid)
        wanted = request.log.open and not request.aborted
        if not wanted or error.code not in RECOVERABLE or request.fruitless >= self._settings.recovery_attempts:
            self._attempts.give_up(request, RequestPhase.ENDED)
            return False
        self._attempts.give_up(request, RequestPhase.RECOVERING)
        # Not for a paused request: it waits for its client, and needs no engine meanwhile.
        self._suspects.wait(request.suspicion)
        self._begin(request, error)
        return True

    def _supply(self, request: RequestState) -> bool:
        """Whether the engine that lacks its adapter gets the files."""
        adapter = request.spec.adapter
        return adapter is not None and self._adapters.loads.supply(request.attempt.engine, adapter.version)

    def too_slow(self, request: RequestState) -> bool:
        """Whether the client leaves so much unread that its request should pause."""
        settings = self._settings
        if not request.spec.streaming:
            return False
        # Without regard to the client if there are so many: they may wait for a detokenizer that is slow.
        return request.log.tensors.nbytes > 2 * settings.max_undelivered_bytes or request.log.reader_behind(
            settings.max_undelivered_tokens, settings.max_undelivered_bytes
        )

    def pause(self, request: RequestState) -> None:
        """Give up the attempt and the permit until the client has read enough."""
        request.on_attempt_lost(ErrorCode.SLOW_CLIENT.name)
        self._attempts.give_up(request, RequestPhase.PAUSED)
        log = request.log
        message = f"{log.undelivered} tokens and {log.tensors.nbytes} bytes of tensors wait for the client"
        self._begin(request, RequestError(ErrorCode.SLOW_CLIENT, message))

    def cancel(self, request: RequestState) -> None:
        """No further attempt, if one was to follow."""
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
        self._tasks[request] = asyncio.get_running_loop().create_task(self._run(request, error))

    async def _run(self, request: RequestState, error: RequestError) -> None:
        limit = request.spec.time_limit
        # The time limit counts from the arrival, not from this attempt.
        left = None if limit is None else max(0.0, request.arrived + limit - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await self._resubmit(request, error)
        except TimeoutError:
            request.log.finish(FinishReason.TIME_LIMIT)
            request.end()
        except RequestError as failure:
            request.log.fail(failure)
            request.end()
        except Exception:  # noqa: BLE001 - it ends this request, not the loop of all others
            self._log.exception("recovery_failed", **request.log_ids)
            request.log.fail(RequestError(ErrorCode.INTERNAL, "an internal error; the server's log has more"))
            request.end()
        finally:
            # Another task of this request may run already: its new attempt can be lost before this one is done.
            if self._tasks.get(request) is asyncio.current_task():
                del self._tasks[request]
                self._suspects.stop_waiting(request.suspicion)

    async def _resubmit(self, request: RequestState, error: RequestError) -> None:
        if request.phase is RequestPhase.PAUSED:
            settings = self._settings
            await request.log.caught_up(settings.max_undelivered_tokens // 2, settings.max_undelivered_bytes // 2)
            # Never refused; and without context tokens, which its tenant was charged for with the first permit.
            permit = await self._admission.acquire(request.spec.priority, 0, request.tenant, refusable=False)
            request.on_admitted(permit)
        await asyncio.sleep(_backoff(request.fruitless))
        try:
            async with asyncio.timeout(self._settings.recovery_timeout):
                while not await self._try(request):
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            # The client has caught up: what is missing now is a peer, so the error must not blame the client.
            code = ErrorCode.NO_ENGINE if error.code is ErrorCode.SLOW_CLIENT else error.code
            seconds = self._settings.recovery_timeout
            message = f"{error.message}; no engine and detokenizer could continue it within {seconds:g} s"
            raise RequestError(code, message) from None

    async def _try(self, request: RequestState) -> bool:
        await self._membership.ready.wait()
        async with self._turn:
            # One at a time, and others run in between: the loss of a peer sends many requests here at once.
            await asyncio.sleep(0)
            return self._attempts.try_submit(request)


def _backoff(fruitless: int) -> float:
    """Random seconds to wait after so many attempts in a row that brought no token; none after the first."""
    if fruitless < 2:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(fruitless - 2, 16)) * (0.5 + random() / 2)
