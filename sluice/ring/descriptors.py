"""File descriptors: the soft limit is raised to just below the hard one; what must not fail may use the rest."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.stdlib import BoundLogger

RESERVED = 128
# Of a low limit one part in this many is reserved instead, so that the reserve does not take most of it.
RESERVED_FRACTION = 8
LANE_DESCRIPTORS = 4
"""A socket, its connection, a second one while keys change, and the connection on which the peer sends."""
WATCHED_LANE_DESCRIPTORS = LANE_DESCRIPTORS + 2
"""Plus both ends of its monitor."""
OWN_DESCRIPTORS = 128
"""Of a service without lanes and clients: ZeroMQ's and gRPC's threads, inbox, health server, files, GPU driver."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one less the reserve. Returns the new soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _without_reserve(hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
        # macOS reports an unlimited hard limit, and enforces a lower one.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit


def check_limit(limit: int, needed: int, log: BoundLogger) -> None:
    """Warn if the settings may need more."""
    if limit < needed:
        log.warning(
            "few_descriptors", limit=limit, needed=needed, remedy=f"a hard limit (ulimit -Hn) of {needed + RESERVED}"
        )


def exhausted(error: Exception) -> bool:
    """Whether an OSError or ZMQError means that no descriptor was left."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


@contextmanager
def reserve() -> Iterator[None]:
    """A context in which the reserve may be used. It holds for all threads, so leave it soon.

    Closing one descriptor to open another would not do: when unknown clients exhaust them, a ZeroMQ thread that
    waits for a free one takes it first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        # Not `soft` alone: another thread may have raised the limit before this one read it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, _without_reserve(hard)), hard))


def _without_reserve(hard: int) -> int:
    return hard if hard == resource.RLIM_INFINITY else hard - min(RESERVED, hard // RESERVED_FRACTION)
