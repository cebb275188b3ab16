"""From one attempt to the next: a request that lost its attempt waits for peers, or for its own slow reader."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import random

import structlog

from router.errors import RequestError
from router.peers.membership import Membership
from router.requests.admission import Permit
from router.requests.attempts import Attempts
from router.requests.counters import RequestCounters
from router.requests.registry import RequestState
from router.requests.suspects import Suspects
from sluice.ring.errors import ErrorCode, FinishReason
from sluice.settings.router import RecoverySettings

RETRY_SECONDS = 0.02
"""Between two looks for a peer with room."""
FIRST_BACKOFF_SECONDS = 0.05
LONGEST_BACKOFF_SECONDS = 1.0

HELPED = frozenset(
    {
        ErrorCode.ENGINE_LOST,
        ErrorCode.DETOKENIZER_LOST,
        ErrorCode.ROWS_LOST,
        ErrorCode.DRAINING,
        ErrorCode.OVERLOADED,
        ErrorCode.STEP_FAILED,
        ErrorCode.QUARANTINE,
    }
)
"""What another attempt may do better."""
SHUNNED = frozenset({ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.STEP_FAILED})
"""Those after which it had better be elsewhere. After lost rows the same engine has the prefix still cached."""

Readmit = Callable[[RequestState], Awaitable[Permit]]
"""A new permit for a request that gave its own back. It is not refused."""


class Recovery:
    """Has one task for each request between two attempts."""

    def __init__(
        self,
        attempts: Attempts,
        members: Membership,
        readmit: Readmit,
        settings: RecoverySettings,
        suspects: Suspects,
        tally: RequestCounters,
        logger: structlog.stdlib.BoundLogger,
    ) -> None:
        self._attempts = attempts
        self._members = members
        self._readmit = readmit
        self._settings = settings
        self._suspects = suspects
        self._tally = tally
        self._logger = logger
        self._tasks: dict[RequestState, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    @property
    def waiting(self) -> int:
        """Requests between two attempts."""
        return len(self._tasks)

    def lose(self, live: RequestState, error: RequestError) -> bool:
        """Give up the attempt that is on the ring; whether another one follows, of itself, as soon as it can."""
        route = live.route
        self._count(live, error.code is not ErrorCode.QUARANTINE)
        if route is not None and error.code is ErrorCode.QUARANTINE:
            route.engine.refuses = True
        if route is not None and error.code in SHUNNED:
            live.avoided |= {route.engine.epoch, route.detokenizer.epoch}
        self._attempts.give_up(live)
        if live.aborted or not live.log.open:
            return False
        if error.code not in HELPED or live.fruitless >= self._settings.recovery_attempts:
            return False
        self._begin(live, error)
        return True

    def too_slow(self, live: RequestState) -> bool:
        """Whether the client leaves so much unread that its request had better stop for a while."""
        return live.spec.streaming and live.log.behind(self._settings.max_undelivered_tokens)

    def pause(self, live: RequestState) -> None:
        """Give the attempt and the permit up until the client has read enough."""
        self._count(live, True)
        self._attempts.give_up(live)
        live.give_permit_back()
        self._begin(live, RequestError(ErrorCode.SLOW_CLIENT, f"{live.log.undelivered} tokens wait for the client"))

    def stop(self, live: RequestState) -> None:
        """No further attempt, if one was to follow."""
        self._suspects.stop_waiting(live.suspicion)
        task = self._tasks.pop(live, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Stop all."""
        for live in list(self._tasks):
            self.stop(live)

    def _count(self, live: RequestState, taken: bool) -> None:
        """What the attempt has brought, where an engine had taken it in."""
        if live.log.received > live.received:
            live.received, live.fruitless = live.log.received, 0
            live.avoided.clear()
        else:
            live.fruitless += taken

    def _begin(self, live: RequestState, error: RequestError) -> None:
        self._tally.recoveries[error.code.name] += 1
        self._logger.info(
            "attempt given up",
            request_id=live.spec.request_id,
            attempt=live.attempt - 1,
            reason=error.code.name,
            message=error.message,
            received_tokens=live.log.received,
            engine=live.engine,
            detokenizer=live.detokenizer,
        )
        if error.code is not ErrorCode.SLOW_CLIENT:
            self._suspects.wait(live.suspicion)
        self._tasks[live] = asyncio.get_running_loop().create_task(self._run(live, error))

    async def _run(self, live: RequestState, error: RequestError) -> None:
        limit = live.spec.time_limit
        left = None if limit is None else max(0.0, live.arrived + limit - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await self._go_on(live, error)
        except TimeoutError:
            live.log.finish(FinishReason.TIME_LIMIT)
            live.give_permit_back()
        except RequestError as failure:
            live.log.fail(failure)
            live.give_permit_back()
        except Exception:
            self._logger.exception("recovery failed", request_id=live.spec.request_id)
            live.log.fail(RequestError(ErrorCode.INTERNAL, "an internal error; the server's log has more"))
            live.give_permit_back()
        finally:
            if self._tasks.get(live) is asyncio.current_task():
                del self._tasks[live]
                self._suspects.stop_waiting(live.suspicion)

    async def _go_on(self, live: RequestState, error: RequestError) -> None:
        if live.permit is None:
            await live.log.caught_up(self._settings.max_undelivered_tokens // 2)
            live.permit = await self._readmit(live)
        await asyncio.sleep(_backoff(live.fruitless))
        try:
            async with asyncio.timeout(self._settings.recovery_timeout):
                while not await self._try(live):
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            code = ErrorCode.NO_ENGINE if error.code is ErrorCode.SLOW_CLIENT else error.code
            message = f"{error.message}; for {self._settings.recovery_timeout:g} s nobody was there to go on"
            raise RequestError(code, message) from None

    async def _try(self, live: RequestState) -> bool:
        await self._members.ready.wait()
        async with self._turn:
            # One at a time with others' turns between: a lost peer sends many here at once.
            await asyncio.sleep(0)
            return self._attempts.try_submit(live)


def _backoff(fruitless: int) -> float:
    """Seconds, at random, before the attempt that follows so many that brought nothing: none after the first."""
    if fruitless < 2:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(fruitless - 2, 16)) * (0.5 + random() / 2)
