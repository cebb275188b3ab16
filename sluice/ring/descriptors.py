"""File descriptors of this process: as many as it may have, and a few kept back for what must not fail."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.stdlib import BoundLogger

KEPT_BACK = 128
KEPT_BACK_PART = 8
"""Of a low limit this part is kept back instead."""
LANE_DESCRIPTORS = 4
"""Its socket and its connection, a second one while keys are changed, and the one by which its peer sends."""
WATCHED_LANE_DESCRIPTORS = LANE_DESCRIPTORS + 2
"""With the two ends of its monitor."""
OWN_DESCRIPTORS = 128
"""Of a service without lanes and clients: threads of ZeroMQ and gRPC, its inbox, health, files, a GPU's driver."""


def raise_limit() -> int:
    """Let this process open as many as the system allows, but for those that are kept back; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _without_kept_back(hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):
        # macOS says that there is no hard limit, and has one.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit


def check_limit(limit: int, needed: int, log: BoundLogger) -> None:
    """Warn where the settings may need more."""
    if limit < needed:
        log.warning(
            "few_descriptors", limit=limit, needed=needed, remedy=f"a hard limit (ulimit -Hn) of {needed + KEPT_BACK}"
        )


def exhausted(error: Exception) -> bool:
    """Whether an OSError or ZMQError means that there was no descriptor left."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


@contextmanager
def kept_back() -> Iterator[None]:
    """Those that are kept back may be used, by all threads: so leave it soon.

    To close a descriptor in order to open another would not do: where they run out because strangers connect, a thread
    of ZeroMQ that waits for a free one is quicker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        # Not `soft`: another thread may have found it raised by this one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, _without_kept_back(hard)), hard))


def _without_kept_back(hard: int) -> int:
    return hard if hard == resource.RLIM_INFINITY else hard - min(KEPT_BACK, hard // KEPT_BACK_PART)
