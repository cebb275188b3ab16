"""Logits processors that are functions of this program: the engines of its ring call them here."""

import logging
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.ring.callbacks import SCHEME, Answer, Call, CalledSequence, Frames, NewestSequences

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sluice.executor")
BACKLOG = 64
MAX_DETAIL = 200

Processor = Callable[..., None]
"""`(request_id, logits, token_ids, stream, client_id)`, or, if batched, with lists; see docs/processors.md."""
Tokens = NewestSequences[list[int]]


def module_name(function: Processor) -> str | None:
    """As "module:name", if another process can import it by that; None: it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is function else None


class Callbacks:
    """The functions of one executor, each behind a socket of its own, in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._listeners: list[socket.socket] = []

    def settings(self, named: Mapping[str, Processor | str] | None, batched: Processor | str | None) -> dict[str, Any]:
        """Of the engines. Serves the functions that engines cannot import. Raises TypeError, OSError."""
        found: dict[str, Any] = {}
        if named:
            found["logits_processors"] = {name: self._place(name, each, batched=False) for name, each in named.items()}
        if batched is not None:
            found["logits_processor_batched"] = self._place("batched", batched, batched=True)
        return found

    @property
    def serves(self) -> bool:
        """Whether engines call functions here, so that they must be on this machine."""
        return bool(self._listeners)

    def close(self) -> None:
        """Once no engine runs. Does not wait for a call that hangs."""
        for listener in self._listeners:
            # Ends the wait of its thread, which closing does not.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._listeners = []

    def _place(self, name: str, function: Processor | str, *, batched: bool) -> str:
        if isinstance(function, str):
            return function
        if not callable(function):
            raise TypeError(f"the logits processor {name!r} must be a function or module:function; it is {function!r}")
        return module_name(function) or self._serve(name, function, batched=batched)

    def _serve(self, name: str, function: Processor, *, batched: bool) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sluice_"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / f"processor_{len(self._listeners)}"
        listener = socket.socket(socket.AF_UNIX)
        self._listeners.append(listener)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        target = Target(name, function, batched=batched)
        threading.Thread(target=_accept, args=(listener, target), name=f"processor {name}", daemon=True).start()
        return f"{SCHEME}{path}"


class Target:
    """A function and the engines that call it, one at a time."""

    def __init__(self, name: str, function: Processor, *, batched: bool) -> None:
        # Here, since it takes seconds.
        import torch

        self._torch = torch
        self._name = name
        self._function = function
        self._batched = batched
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Until the engine closes it or dies."""
        frames, known = Frames(connection), Tokens()
        with connection:
            try:
                while (found := frames.receive(Call)) is not None:
                    call, size = found
                    data = bytearray(size)
                    if not frames.fill(memoryview(data)):
                        return
                    answer = self._run(call, data, known)
                    frames.send(answer, [memoryview(data)] if answer.error is None else [])
            except (OSError, ValueError, msgspec.DecodeError) as error:
                log.debug("the logits processor %r lost an engine: %s", self._name, error)

    def _run(self, call: Call, data: bytearray, known: Tokens) -> Answer:
        """Changes the rows in `data`."""
        try:
            tokens = [_tokens(each, known) for each in call.sequences]
            rows = self._torch.frombuffer(data, dtype=self._torch.float32).view(len(tokens), 1, 1, -1)
            self._call(call, list(rows), [[each] for each in tokens])
        except (Exception, SystemExit) as error:
            log.warning("the logits processor %r failed", self._name, exc_info=error)
            return Answer(type(error).__name__, _text(error))
        return Answer()

    def _call(self, call: Call, rows: "list[Tensor]", tokens: list[list[list[int]]]) -> None:
        ids = [each.request_id for each in call.sequences]
        clients = [each.client_id for each in call.sequences]
        # Views, so that what the function makes of its own is seen and does not change these.
        given = [row.view(row.shape) for row in rows]
        with self._lock, self._torch.no_grad():
            if self._batched:
                self._function(ids, list(given), tokens, None, clients)
            else:
                for each in zip(ids, given, tokens, clients, strict=True):
                    self._function(*each[:3], None, each[3])
        for row, changed in zip(rows, given, strict=True):
            if changed.shape != row.shape or changed.dtype != row.dtype:
                shape, dtype = list(changed.shape), changed.dtype
                raise ValueError(f"it has made the logits {shape} {dtype}, must be {list(row.shape)} {row.dtype}")
            if changed.data_ptr() != row.data_ptr():
                row.copy_(changed)


def _accept(listener: socket.socket, target: Target) -> None:
    for number in count():
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        name = f"{threading.current_thread().name} {number}"
        threading.Thread(target=target.serve, args=(connection,), name=name, daemon=True).start()


def _tokens(sequence: CalledSequence, known: Tokens) -> list[int]:
    """All of the sequence, in the list that its function got before."""
    tokens = known.pop(sequence.number)
    if tokens is None:
        tokens = []
    if len(tokens) < sequence.keep:
        raise ValueError("it has changed the token ids that it was given")
    tokens[sequence.keep :] = sequence.tokens
    known.put(sequence.number, tokens, len(tokens))
    return tokens


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_DETAIL]
    except Exception as broken:  # noqa: BLE001 - an exception's own code may do anything
        return f"its message raised {type(broken).__name__}"
