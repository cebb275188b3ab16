"""A ring on this machine: starts the services as child processes, waits until they serve, and ends them in order."""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from sluice import tiny_model
from sluice.client import Client, DeadlineExceeded, SluiceError
from sluice.launch.child import Child, Role
from sluice.launch.logs import LogLine, Observe, ignore
from sluice.launch.plan import Plan, child_environment, services
from sluice.ring.checkpoint import open_checkpoint

ROLES: tuple[Role, ...] = ("router", "engine", "detok")
TINY_MODEL_NAME = "tiny"
POLL_SECONDS = 0.05
SIGNAL_SECONDS = 0.25
KILL_AFTER_SECONDS = 5.0
"""A child that has not ended this long after its drain timeout is killed."""
SHORT_TEMP = "/tmp"  # noqa: S108
MAX_FOLDER_LENGTH = 80
"""The path of an ipc socket may have about 107 bytes, on macOS 103."""


class RingError(RuntimeError):
    """The ring could not start. `tail` holds the last log lines of the child at fault, if one is."""

    def __init__(self, message: str, tail: Iterable[str] = ()) -> None:
        self.tail = tuple(tail)
        super().__init__("\n".join([message, *self.tail]))
        self.message = message


class Ring:
    """A router, engines and detokenizers as processes: `with Ring(engines=2) as ring: Client(ring.address)`.

    `model` is a checkpoint folder or hub id, None the tiny model in the box; the other options are those of `Plan`.
    `observe` gets every log line. The children die with the thread that starts the ring: start it from one that stays.
    Raises CheckpointError for a model that cannot be opened, ValueError for wrong options, RingError if starting fails.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        name: str | None = None,
        start_timeout: float = 600.0,
        observe: Observe = ignore,
        **options: Any,
    ) -> None:
        if model is None:
            model, name = tiny_model.path(), name or TINY_MODEL_NAME
        checkpoint = open_checkpoint(str(model), name)
        self.plan = Plan(model=str(checkpoint.path), name=checkpoint.name, **options)
        self.address = ""
        """Of the router, such as "127.0.0.1:50051"; known once it has started."""
        self.children: dict[str, Child] = {}
        self._start_timeout = start_timeout
        self._observe = observe
        self._ended: SimpleQueue[Child] = SimpleQueue()
        self._folder: Path | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service: "router", "engine-0", …, "detok-0", …"""
        return {name: child.pid for name, child in self.children.items()}

    @property
    def missing(self) -> list[Role]:
        """Roles of which no child is alive: while there are any, nothing can be served."""
        return [role for role in ROLES if not any(child.alive for child in self._of(role))]

    def start(self) -> None:
        """Start everything and wait until all engines and detokenizers serve. Leaves nothing running if it raises."""
        try:
            self._folder = _short_folder()
            environment = child_environment()
            for service in services(self.plan, self._folder):
                self.children[service.name] = Child(
                    service.name, service.role, service.command, environment, self._watch, self._ended.put
                )
            self._await_ready(time.monotonic() + self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Drain: the router first, so that live streams end; then engines and detokenizers, for which nobody waits."""
        self._stop(self._of("router"))
        self._stop([*self._of("engine"), *self._of("detok")])

    def kill(self) -> None:
        """End what still runs at once, and remove the sockets."""
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait(KILL_AFTER_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def deaths(self) -> Iterator[Child]:
        """Children that end by themselves, as they do; waits for the next one."""
        while True:
            # With a timeout: a signal that comes just before an endless wait would not end it.
            with suppress(Empty):
                yield self._ended.get(timeout=SIGNAL_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    def _of(self, role: Role) -> list[Child]:
        return [child for child in self.children.values() if child.role == role]

    def _watch(self, line: LogLine) -> None:
        if line.child == "router" and line.event == "ready":
            self.address = str(line.fields["address"])
        self._observe(line)

    def _await_ready(self, deadline: float) -> None:
        while not self.address:
            self._pause(deadline, "the router to listen")
        with Client(self.address, timeout=5) as client:
            while not self._all_serve(client):
                self._pause(deadline, "all engines and detokenizers to serve")

    def _all_serve(self, client: Client) -> bool:
        try:
            if not client.health():
                return False
            stats = client.stats()
        except SluiceError as error:
            if error.retryable or isinstance(error, DeadlineExceeded):
                return False
            raise
        return len(stats.engines) >= self.plan.engines and len(stats.detokenizers) >= self.plan.detokenizers

    def _pause(self, deadline: float, purpose: str) -> None:
        if not self._ended.empty():
            child = self._ended.get()
            raise RingError(f"{child.name} {child.ending} while starting", child.tail)
        if time.monotonic() > deadline:
            raise RingError(f"waited {self._start_timeout:g} s for {purpose}")
        time.sleep(POLL_SECONDS)

    def _stop(self, children: list[Child]) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self.plan.drain_timeout + KILL_AFTER_SECONDS
        for child in children:
            if not child.wait(deadline - time.monotonic()):
                child.kill()


def _short_folder() -> Path:
    """A private folder with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-"))
    if len(str(folder)) <= MAX_FOLDER_LENGTH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="sluice-", dir=SHORT_TEMP))
