"""The operator's own authentication function (`--auth module:function`)."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from structlog.stdlib import BoundLogger

from router.access.principal import Principal
from router.errors import RequestError
from sluice.ring.errors import ErrorCode

MAX_THREADS = 16

Metadata = Mapping[str, str | bytes]


class ClientPeer(NamedTuple):
    address: str
    """In gRPC's notation, such as "ipv4:10.0.0.7:53124"."""
    names: tuple[str, ...]
    """Of the client's certificate: its subject alternative names, else its common name. Empty without one."""


Function = Callable[[Metadata, ClientPeer], Principal | Awaitable[Principal]]


@dataclass(frozen=True)
class AuthHook:
    """Calls a function: a coroutine function on the event loop, which it must not block, any other in a thread."""

    _function: Function
    _timeout: float
    _log: BoundLogger
    _threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))

    async def ask(self, metadata: Metadata, peer: ClientPeer) -> Principal:
        """Raises RequestError FORBIDDEN for a PermissionError, AUTH_UNAVAILABLE for a timeout, else UNAUTHENTICATED."""
        try:
            async with asyncio.timeout(self._timeout):
                found = await self._call(metadata, peer)
        except PermissionError as error:
            raise _refusal(ErrorCode.FORBIDDEN, "hook_refused", "access denied") from error
        except TimeoutError as error:
            message = "the caller could not be authenticated in time"
            raise _refusal(ErrorCode.AUTH_UNAVAILABLE, "hook_timeout", message) from error
        except (Exception, SystemExit) as error:
            # The exception's text and values may hold the token: only its type and place are logged.
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._log.error("auth_hook_failed", error=type(error).__name__, at=f"{where.filename}:{where.lineno}")
            raise _refusal(ErrorCode.UNAUTHENTICATED, "hook_failed", "the caller could not be authenticated") from error
        if not isinstance(found, Principal):
            self._log.error("auth_hook_failed", error=f"it returned {type(found).__name__}, not Principal")
            raise _refusal(ErrorCode.UNAUTHENTICATED, "hook_failed", "the caller could not be authenticated")
        return found

    async def _call(self, metadata: Metadata, peer: ClientPeer) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(metadata, peer)
        # Released when the thread ends, which may be long after the timeout: so stuck calls cannot pile up threads.
        await self._threads.acquire()
        found, error = await _in_thread(lambda: self._function(metadata, peer), self._threads.release)
        if error is not None:
            raise error
        return await found if inspect.isawaitable(found) else found


def _refusal(code: ErrorCode, cause: str, message: str) -> RequestError:
    return RequestError(code, message, metadata={"cause": cause})


def _in_thread(call: Callable[[], Any], done: Callable[[], None]) -> "asyncio.Future[tuple[Any, BaseException | None]]":
    """(result, exception) of `call`. `done` runs on the loop when `call` has returned, even after a cancel."""
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
        except BaseException as raised:  # noqa: BLE001 - user code; raised again in the caller
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    # A daemon thread, so that a call that never returns does not keep the process alive.
    threading.Thread(target=run, name="auth", daemon=True).start()
    return result
