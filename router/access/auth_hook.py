"""A function of the user's that says who calls."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from structlog.stdlib import BoundLogger

from router.access.principal import Principal

MAX_THREADS = 16

Metadata = Mapping[str, str | bytes]


class Peer(NamedTuple):
    """Where a call comes from."""

    address: str
    """As gRPC writes it, such as "ipv4:10.0.0.7:53124"."""
    names: tuple[str, ...]
    """Of the client's certificate: the subject's alternative names, else its common name. Empty without one."""


Function = Callable[[Metadata, Peer], Principal | Awaitable[Principal]]


class HookError(Exception):
    """The function, or what became of it, lets nobody in."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """`hook_refused`: it raised PermissionError; `hook_timeout`; `hook_failed`: anything else."""


class AuthHook:
    """Asks `function`. A coroutine function runs on the event loop and must not block it, any other in a thread."""

    def __init__(self, function: Function, seconds: float, logger: BoundLogger) -> None:
        self._function = function
        self._seconds = seconds
        self._logger = logger
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def ask(self, metadata: Metadata, peer: Peer) -> Principal:
        """Who calls. Raises HookError."""
        try:
            async with asyncio.timeout(self._seconds):
                found = await self._call(metadata, peer)
        except PermissionError as error:
            raise HookError("hook_refused", "the caller is not let in") from error
        except TimeoutError as error:
            raise HookError("hook_timeout", "who calls could not be found out in time") from error
        except (Exception, SystemExit) as error:
            # Neither its text nor its values: they may well be the token.
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._logger.error("auth failed", error=type(error).__name__, at=f"{where.filename}:{where.lineno}")
            raise HookError("hook_failed", "who calls could not be found out") from error
        if not isinstance(found, Principal):
            self._logger.error("auth failed", error=f"it returned {type(found).__name__}, not Principal")
            raise HookError("hook_failed", "who calls could not be found out")
        return found

    async def _call(self, metadata: Metadata, peer: Peer) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(metadata, peer)
        await self._threads.acquire()
        found, error = await _in_thread(lambda: self._function(metadata, peer), self._threads.release)
        if error is not None:
            raise error
        return await found if inspect.isawaitable(found) else found


def _in_thread(call: Callable[[], Any], done: Callable[[], None]) -> "asyncio.Future[tuple[Any, BaseException | None]]":
    """What `call` returned or raised. `done` runs on the loop when it has, however long that takes.

    A daemon: one that never returns must not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        done()
        if not result.done():
            result.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # noqa: BLE001 - it is the user's code, and travels to whoever asked
            error = raised
        with suppress(RuntimeError):  # the loop has gone
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="auth", daemon=True).start()
    return result
