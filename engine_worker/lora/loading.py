"""A load of an adapter from files to host memory."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

from engine_worker.lora.checkpoint import AdapterWeights
from sluice.wire.errors import Fault


class Loaded(NamedTuple):
    version: str
    weights: AdapterWeights


class Loading:
    """See `engine_worker.protocol.Preparation`. Requests for the same version from the same path share it."""

    def __init__(
        self,
        advance: Callable[[], None],
        read: Callable[[], Loaded] | None = None,
        *,
        patient: bool = False,
        uploaded: str = "",
    ) -> None:
        """`read`: reads the adapter, in a thread; None: another load will provide it. `patient`: see the attribute.
        `uploaded`: the version, if the adapter was uploaded."""
        self.done = False
        self.fault: Fault | None = None
        self.version = ""
        """Known once the load has ended without a fault; so is `rank`."""
        self.rank = 0
        self.future: Future[Loaded] | None = None
        """None: the adapter is not being read."""
        self.nbytes = 0
        """Size in host memory; known once the adapter was read and there was no room for it."""
        self.patient = patient
        """Whether the load waits while host memory is full of adapters in use."""
        self.uploaded = uploaded
        self._advance = advance
        self._read = read

    @property
    def readable(self) -> bool:
        """Whether `begin` would read the adapter: it can be read and is not being read."""
        return self._read is not None and self.future is None

    def begin(self, threads: Executor) -> None:
        if self._read is not None:
            self.future = threads.submit(self._read)

    def poll(self) -> bool:
        if not self.done:
            self._advance()
        return self.done

    def withdraw(self) -> None:
        """No effect: the load continues, for the next request."""

    def end(self, fault: Fault | None = None) -> None:
        self.done, self.fault, self.future, self._read = True, fault, None, None
