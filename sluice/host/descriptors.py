"""File descriptors: raises the soft limit to just below the hard one. The rest is reserved for what must not fail."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.stdlib import BoundLogger

RESERVED = 128
RESERVED_FRACTION = 8
"""At most 1 / RESERVED_FRACTION of the hard limit is reserved, so that the reserve is not most of a low limit."""
LANE_DESCRIPTORS = 4
"""Per lane: its socket, its connection, a second one while keys change, and the connection on which the peer sends."""
WATCHED_LANE_DESCRIPTORS = LANE_DESCRIPTORS + 2
"""Per watched lane: also both ends of its monitor."""
OWN_DESCRIPTORS = 128
"""Per service, without lanes and clients: ZeroMQ's and gRPC's threads, inbox, health server, files, GPU driver."""


def raise_limit() -> int:
    """Raise the soft limit to the hard limit minus the reserve. Returns the new soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _without_reserve(hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
        # macOS reports an unlimited hard limit but enforces a lower one.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit


def check_limit(limit: int, needed: int, log: BoundLogger) -> None:
    """Warn if the settings may need more descriptors than the limit allows."""
    if limit < needed:
        log.warning(
            "few_descriptors", limit=limit, needed=needed, remedy=f"a hard limit (ulimit -Hn) of {needed + RESERVED}"
        )


def exhausted(error: Exception) -> bool:
    """Whether an OSError or ZMQError means that no file descriptor was available."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


@contextmanager
def reserve() -> Iterator[None]:
    """A context in which the reserve may be used. It applies to all threads, so leave it quickly.

    Closing one descriptor to open another would not work: when clients exhaust the descriptors, a ZeroMQ thread that
    waits for one would use the closed one first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        # Not simply `soft`, because another thread may have raised the limit before this thread read it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, _without_reserve(hard)), hard))


def _without_reserve(hard: int) -> int:
    return hard if hard == resource.RLIM_INFINITY else hard - min(RESERVED, hard // RESERVED_FRACTION)
