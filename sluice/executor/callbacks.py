"""Logits processors that run in this program: functions that the engines of its ring call through Unix sockets."""

import logging
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.executor.forks import remove_with
from sluice.executor.result import GenerationResult
from sluice.executor.session import request_number
from sluice.wire.callbacks import SCHEME, Answer, CallbackCall, CalledSequence, Frames, NewestSequences

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sluice.executor")
BACKLOG = 64
MAX_DETAIL = 200
"""Characters of an exception's message that are sent to the engine."""

Processor = Callable[..., None]
"""`function(request_id, logits, token_ids, stream, client_id)`, or, if batched, with a list of each argument but
`stream`; see docs/processors.md."""
Tokens = NewestSequences[list[int]]


def module_name(function: Processor) -> str | None:
    """The name "module:function" by which another process can import the function; None if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else None


class Callbacks:
    """The logits processors of one executor, each served at a socket in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._listeners: list[socket.socket] = []

    def settings(self, named: Mapping[str, Processor | str] | None, batched: Processor | str | None) -> dict[str, Any]:
        """Serve the functions that engines cannot import, and return the engines' settings that name all functions.

        Raises TypeError, OSError.
        """
        settings: dict[str, Any] = {}
        if named:
            addresses = {name: self._address(name, function, batched=False) for name, function in named.items()}
            settings["logits_processors"] = addresses
        if batched is not None:
            settings["logits_processor_batched"] = self._address("batched", batched, batched=True)
        return settings

    @property
    def serves(self) -> bool:
        """Whether any function runs in this program, which requires engines on this machine."""
        return bool(self._listeners)

    def close(self) -> None:
        """Stop serving, once no engine runs. Does not wait for a call that hangs."""
        for listener in self._listeners:
            # Unlike `close`, this ends the wait of the accepting thread.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._listeners = []

    def _address(self, name: str, function: Processor | str, *, batched: bool) -> str:
        if isinstance(function, str):
            return function
        if not callable(function):
            raise TypeError(f'the logits processor {name!r} must be a function or "module:function" (got {function!r})')
        return module_name(function) or self._serve(name, function, batched=batched)

    def _serve(self, name: str, function: Processor, *, batched: bool) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sluice_"))
            remove_with(self, self._folder)
        path = self._folder / f"processor_{len(self._listeners)}"
        listener = socket.socket(socket.AF_UNIX)
        self._listeners.append(listener)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        target = Target(name, function, batched=batched)
        threading.Thread(target=_accept, args=(listener, target), name=f"processor {name}", daemon=True).start()
        return f"{SCHEME}{path}"


class Target:
    """One function, and the calls that engines make of it, one at a time."""

    def __init__(self, name: str, function: Processor, *, batched: bool) -> None:
        # The import takes seconds, and an engine's call has a time limit.
        if not isinstance(function, RequestProcessors):
            import torch  # noqa: F401

        self._name = name
        self._function = function
        self._batched = batched
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Answer an engine's calls until the engine closes the connection or dies."""
        frames, known = Frames(connection), Tokens()
        with connection:
            try:
                while (received := frames.receive(CallbackCall)) is not None:
                    call, size = received
                    data = bytearray(size)
                    if not frames.fill(memoryview(data)):
                        return
                    answer = self._run(call, data, known)
                    frames.send(answer, [memoryview(data)] if answer.error is None else [])
            except (OSError, ValueError, msgspec.DecodeError) as error:
                log.debug("the logits processor %r lost its connection to an engine: %s", self._name, error)

    def _run(self, call: CallbackCall, data: bytearray, known: Tokens) -> Answer:
        """Call the function on the rows of logits in `data`, which it changes in place."""
        import torch

        try:
            tokens = [_tokens(sequence, known) for sequence in call.sequences]
            rows = torch.frombuffer(data, dtype=torch.float32).view(len(tokens), 1, 1, -1)
            self._call(call, list(rows), [[token_ids] for token_ids in tokens])
        except BaseException as error:  # such as SystemExit: the engine waits for an answer
            log.warning("the logits processor %r failed", self._name, exc_info=error)
            return Answer(type(error).__name__, _text(error))
        return Answer()

    def _call(self, call: CallbackCall, rows: "list[Tensor]", tokens: list[list[list[int]]]) -> None:
        import torch

        ids = [sequence.request_id for sequence in call.sequences]
        clients = [sequence.client_id for sequence in call.sequences]
        # Separate tensor objects over the same memory: the function may assign other storage to them (`logits.data`).
        views = [row.view(row.shape) for row in rows]
        with self._lock, torch.no_grad():
            if self._batched:
                self._function(ids, list(views), tokens, None, clients)
            else:
                for request_id, logits, token_ids, client_id in zip(ids, views, tokens, clients, strict=True):
                    self._function(request_id, logits, token_ids, None, client_id)
        for row, view in zip(rows, views, strict=True):
            if view.shape != row.shape or view.dtype != row.dtype:
                wrong = f"{list(view.shape)} {view.dtype}"
                raise ValueError(f"it changed the logits to {wrong}; they must stay {list(row.shape)} {row.dtype}")
            if view.data_ptr() != row.data_ptr():
                row.copy_(view)


def _accept(listener: socket.socket, target: Target) -> None:
    for number in count():
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        name = f"{threading.current_thread().name} {number}"
        threading.Thread(target=target.serve, args=(connection,), name=name, daemon=True).start()


def _tokens(sequence: CalledSequence, known: Tokens) -> list[int]:
    """All token ids of the sequence, in the same list object that its function received before."""
    tokens = known.pop(sequence.number)
    if tokens is None:
        tokens = []
    if len(tokens) < sequence.keep:
        raise ValueError("it changed the token ids that it received")
    tokens[sequence.keep :] = sequence.tokens
    known.put(sequence.number, tokens, len(tokens))
    return tokens


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_DETAIL]
    except Exception as broken:  # noqa: BLE001 - the `__str__` of a user's exception may raise anything
        return f"its message raised {type(broken).__name__}"


class RequestProcessors:
    """Calls the function of the request that is processed. Thread-safe.

    Give it to `GenerationExecutor.create` as one of the `logits_processors`, and let requests with a function name it.
    Import torch before the first of these requests: that takes seconds, and an engine's call has a time limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[int, Callable[..., Any]] = {}

    def submit(self, submit: Callable[[], GenerationResult], function: Callable[..., Any]) -> GenerationResult:
        """Submit a request with its function."""
        # Under the lock, because an engine may call the function before `submit` has returned the request's id.
        with self._lock:
            result = submit()
            self._functions[result.request_id] = function
        return result

    def forget(self, request_id: int) -> None:
        """Remove the function of a request that has ended, if it has one."""
        with self._lock:
            self._functions.pop(request_id, None)

    def __call__(
        self, name: str, logits: "Tensor", token_ids: list[list[int]], stream: None, client_id: int | None
    ) -> None:
        with self._lock:
            function = self._functions.get(request_number(name))
        # An engine may process one more token after the end of a request.
        if function is not None:
            function(name, logits, token_ids, stream, client_id)
