"""The status file by which a service reports to the launcher: its content is the service's state, its modification time
the latest iteration of the service's loop."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

STATUS_VARIABLE = "SLUICE_STATUS_FILE"
"""Environment variable with the path of the file, which the launcher sets for each service."""
# Interval between touches of the status file: far shorter than the launcher's freeze_timeout, far longer than a step.
TOUCH_SECONDS = 1.0

State = Literal["starting", "ready", "draining"]


class ServiceStatus(msgspec.Struct, frozen=True):
    # While there is no file, the service is starting.
    state: State = "starting"
    address: str = ""
    """Where the service listens: host:port of a router's gRPC server, otherwise the address of the inbox."""
    epoch: int = 0
    """Epoch of an engine or a detokenizer, as in its heartbeats."""
    peers: dict[str, int] = {}
    """For a router: the epochs of the live engines and detokenizers, by name."""


STARTING = ServiceStatus()


class StatusFile:
    """Writes the status file. Not thread-safe. Does nothing in a process that was not started by a launcher."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get(STATUS_VARIABLE)
        self._path = Path(path) if path else None
        self._status = STARTING
        self._written = STARTING

    @property
    def in_use(self) -> bool:
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
        """Record in the modification time that the loop has run. Also retries a write that failed."""
        if self._status != self._written:
            self._write()
        elif self._path is not None:
            with suppress(OSError):
                os.utime(self._path)

    def _write(self) -> None:
        if self._path is None:
            return
        # A launcher that ends removes the folder. Neither that, nor a full disk, nor a lack of file descriptors may end
        # the service.
        with suppress(OSError):
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._status))
            # Atomic: the launcher reads the old status or the new one, never a part of one.
            new.replace(self._path)
            self._written = self._status


class ProgressBeacon:
    """Records iterations and progress of a service's loop. One thread touches it, any thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, status_file: StatusFile | None = None) -> None:
        self.iterations = 0
        self._status_file = status_file
        self._clock = clock
        self._ran_at = self._progressed_at = clock()
        self._file_touched_at = float("-inf")

    @property
    def seconds_since_run(self) -> float:
        """Seconds since the loop last ran."""
        return self._clock() - self._ran_at

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the loop last made progress, or had nothing to do."""
        return self._clock() - self._progressed_at

    def touch(self, progressed: bool = True) -> None:
        """Record an iteration of the loop. `progressed`: it has made progress, or there was no work."""
        self.iterations += 1
        now = self._ran_at = self._clock()
        if progressed:
            self._progressed_at = now
        if self._status_file is not None and now - self._file_touched_at >= TOUCH_SECONDS:
            self._file_touched_at = now
            self._status_file.touch()


Version = tuple[int, int]
"""Version of a service's report: changes with each report and with each touch."""
NO_VERSION: Version = (0, 0)


class StatusSource(Protocol):
    """Reads the reports of one service."""

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        """The latest report; None without a report, or without one newer than `seen`."""

    def reset(self) -> None:
        """Delete the report before a new process of the service is started."""


class StatusFileReader:
    """A `StatusSource` that reads the status file, on the machine of the service."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, seen: Version) -> tuple[Version, bytes] | None:
        with suppress(FileNotFoundError):
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if version != seen:
                return version, self._path.read_bytes()
        return None

    def reset(self) -> None:
        self._path.unlink(missing_ok=True)


class StatusReader:
    """The launcher's view of one service's reports. Times are on the caller's clock. Not thread-safe."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self.status = STARTING
        """The status read by the latest `poll`."""
        self.ran_at: float | None = None
        """When `poll` last saw that the loop had run; None until the first report."""
        self._version = NO_VERSION

    def poll(self, now: float) -> None:
        """Read the report if it has changed since the last poll."""
        report = self._source.read(self._version)
        if report is not None:
            self._version, content = report
            self.status, self.ran_at = msgspec.json.decode(content, type=ServiceStatus), now

    def forgive(self, seconds: float, now: float) -> None:
        """Exclude these seconds, in which the launcher itself was paused, from the time since the loop last ran."""
        if self.ran_at is not None:
            self.ran_at = min(now, self.ran_at + seconds)

    def reset(self) -> None:
        """Call before a new process of the service is started."""
        self._source.reset()
        self.status, self.ran_at, self._version = STARTING, None, NO_VERSION
