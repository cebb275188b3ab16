"""An adapter on its way from files to host memory."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

from engine_worker.lora.checkpoint import AdapterWeights
from sluice.ring.errors import Fault


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
        """`read`: for a thread; None: it comes from elsewhere. `uploaded`: its version, if it was."""
        self.done = False
        self.fault: Fault | None = None
        self.version = ""
        """Known once it is done without a fault; so is `rank`."""
        self.rank = 0
        self.future: Future[Loaded] | None = None
        """None: it is not being read."""
        self.nbytes = 0
        """In host memory; known once it was read and there was no room for it."""
        self.patient = patient
        """Whether it waits while host memory is full of adapters in use."""
        self.uploaded = uploaded
        self._advance = advance
        self._read = read

    @property
    def readable(self) -> bool:
        """Whether it could be read now."""
        return self._read is not None and self.future is None

    def begin(self, threads: Executor) -> None:
        if self._read is not None:
            self.future = threads.submit(self._read)

    def poll(self) -> bool:
        if not self.done:
            self._advance()
        return self.done

    def withdraw(self) -> None:
        """It is loaded all the same, for the next request."""

    def end(self, fault: Fault | None = None) -> None:
        self.done, self.fault, self.future, self._read = True, fault, None, None
