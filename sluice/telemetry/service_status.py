"""What a service reports to the launcher, in a file: its state, and as modification time its loop's latest turn."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

STATUS_VARIABLE = "SLUICE_STATUS_FILE"
"""Names the file; set by the launcher in the environment of each service."""
# Between two touches of the status file: far less than the launcher's freeze_timeout, far more than a step.
TOUCH_SECONDS = 1.0

State = Literal["starting", "ready", "draining"]


class ServiceStatus(msgspec.Struct, frozen=True):
    # Until there is a file, the service is starting.
    state: State = "starting"
    address: str = ""
    """Where it listens: host:port of a router's gRPC server, else the address of the inbox."""
    epoch: int = 0
    """Of an engine or a detokenizer, as in its heartbeats."""
    peers: dict[str, int] = {}
    """Of a router: the epochs of the live engines and detokenizers, by name."""


STARTING = ServiceStatus()


class StatusFile:
    """The writing end. Not thread-safe. Does nothing in a process that no launcher started."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get(STATUS_VARIABLE)
        self._path = Path(path) if path else None
        self._status = STARTING
        self._written = STARTING

    @property
    def wanted(self) -> bool:
        """Whether there is a launcher, and the service has reported that it is ready."""
        return self._path is not None and self._status is not STARTING

    def report(self, status: ServiceStatus) -> None:
        """Replace the file if the status has changed."""
        self._status = status
        if status != self._written:
            self._write()

    def update(self, state: State, peers: dict[str, int]) -> None:
        """Replace the file if one of these has changed."""
        self.report(msgspec.structs.replace(self._status, state=state, peers=peers))

    def touch(self) -> None:
        """Show that the loop turns. Also retries a write that failed."""
        if self._status != self._written:
            self._write()
        elif self._path is not None:
            with suppress(OSError):
                os.utime(self._path)

    def _write(self) -> None:
        if self._path is None:
            return
        # The folder goes with the launcher, and a full disk or a lack of descriptors must not end the service.
        with suppress(OSError):
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._status))
            # The launcher reads the old status or the new one, never half of one.
            new.replace(self._path)
            self._written = self._status


class ProgressBeacon:
    """Shows that a service's loop turns. One thread touches it, any may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, status_file: StatusFile | None = None) -> None:
        self.turns = 0
        self._status_file = status_file
        self._clock = clock
        self._turned_at = self._moved_at = clock()
        self._file_touched_at = float("-inf")

    @property
    def still(self) -> float:
        """Seconds since the loop last turned."""
        return self._clock() - self._turned_at

    @property
    def stuck(self) -> float:
        """Seconds since the loop last made progress, or had nothing to do."""
        return self._clock() - self._moved_at

    def touch(self, moving: bool = True) -> None:
        """The loop has turned. `moving`: and made progress with its work, if there was any."""
        self.turns += 1
        now = self._turned_at = self._clock()
        if moving:
            self._moved_at = now
        if self._status_file is not None and now - self._file_touched_at >= TOUCH_SECONDS:
            self._file_touched_at = now
            self._status_file.touch()


Version = tuple[int, int]
"""Changes with each report of a service and with each touch."""
NO_VERSION: Version = (0, 0)


class StatusSource(Protocol):
    """Where the reports of one service are read."""

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        """The latest report; None if there is none, or none after `seen`."""

    def reset(self) -> None:
        """Forget the reports so far: a new process begins."""


class StatusFileReader:
    """A `StatusSource` on the machine of the service."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        with suppress(FileNotFoundError):
            found = self._path.stat()
            version = (found.st_mtime_ns, found.st_ino)
            if version != seen:
                return version, self._path.read_bytes()
        return None

    def reset(self) -> None:
        self._path.unlink(missing_ok=True)


class StatusReader:
    """The launcher's end: what one service reports. Times are of the caller's clock. Not thread-safe."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self.status = STARTING
        """As of the latest `poll`."""
        self.turned_at: float | None = None
        """When the loop was last seen to have turned; None before its service was ready."""
        self._version = NO_VERSION

    def poll(self, now: float) -> None:
        """Read the report if it has changed since the last time."""
        found = self._source.read(self._version)
        if found is not None:
            self._version, content = found
            self.status, self.turned_at = msgspec.json.decode(content, type=ServiceStatus), now

    def forgive(self, seconds: float, now: float) -> None:
        """Do not count these seconds as a standstill of the service."""
        if self.turned_at is not None:
            self.turned_at = min(now, self.turned_at + seconds)

    def reset(self) -> None:
        """A new process begins."""
        self._source.reset()
        self.status, self.turned_at, self._version = STARTING, None, NO_VERSION
