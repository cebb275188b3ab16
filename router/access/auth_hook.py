"""The operator's authentication function (`--auth module:function`)."""

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
from sluice.wire.errors import ErrorCode

MAX_THREADS = 16
"""Calls of the function that may run at the same time in threads."""

Metadata = Mapping[str, str | bytes]


class ClientPeer(NamedTuple):
    address: str
    """In gRPC's notation, such as "ipv4:10.0.0.7:53124"."""
    names: tuple[str, ...]
    """Subject alternative names of the client's certificate, or its common name if it has none. Empty without a
    certificate."""


Function = Callable[[Metadata, ClientPeer], Principal | Awaitable[Principal]]


@dataclass(frozen=True)
class AuthHook:
    """Calls the operator's function: a coroutine function on the event loop, which it must not block; any other
    function in a thread."""

    _function: Function
    _timeout: float
    _log: BoundLogger
    _threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))

    async def authenticate(self, metadata: Metadata, peer: ClientPeer) -> Principal:
        """Raises RequestError: FORBIDDEN if the function raises PermissionError, AUTH_UNAVAILABLE after the timeout,
        UNAUTHENTICATED for any other failure."""
        try:
            async with asyncio.timeout(self._timeout):
                caller = await self._call(metadata, peer)
        except PermissionError as error:
            raise _refusal(ErrorCode.FORBIDDEN, "hook_refused", "access denied") from error
        except TimeoutError as error:
            message = "the caller could not be authenticated in time"
            raise _refusal(ErrorCode.AUTH_UNAVAILABLE, "hook_timeout", message) from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # The exception's text and values may contain the token, so log only its type and place.
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._log.error("auth_hook_failed", error=type(error).__name__, at=f"{where.filename}:{where.lineno}")
            raise _refusal(ErrorCode.UNAUTHENTICATED, "hook_failed", "the caller could not be authenticated") from error
        if not isinstance(caller, Principal):
            self._log.error("auth_hook_failed", error=f"the function returned {type(caller).__name__}, not Principal")
            raise _refusal(ErrorCode.UNAUTHENTICATED, "hook_failed", "the caller could not be authenticated")
        return caller

    async def _call(self, metadata: Metadata, peer: ClientPeer) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(metadata, peer)
        # Released when the thread ends, which may be long after the timeout, so that stuck calls cannot accumulate
        # threads.
        await self._threads.acquire()
        result, error = await _in_thread(lambda: self._function(metadata, peer), self._threads.release)
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result


def _refusal(code: ErrorCode, cause: str, message: str) -> RequestError:
    return RequestError(code, message, metadata={"cause": cause})


def _in_thread(call: Callable[[], Any], done: Callable[[], None]) -> "asyncio.Future[tuple[Any, BaseException | None]]":
    """(result, exception) of `call`. When `call` has returned, `done` runs on the loop, even if the future was
    cancelled."""
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
