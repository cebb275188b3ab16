"""W3C Trace Context: the trace that a request belongs to."""

import re
import secrets
from dataclasses import dataclass

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
FIRST_VERSION, NO_VERSION = "00", "ff"
SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: int
    """128 bits."""
    parent_id: int | None
    """The caller's span; None if the request begins its trace."""
    sampled: bool
    """Whether the caller records the trace."""

    @property
    def hex_id(self) -> str:
        return f"{self.trace_id:032x}"


def new_context() -> TraceContext:
    # Zero is not a valid id.
    return TraceContext(secrets.randbits(128) or 1, None, True)


def read_traceparent(text: str) -> TraceContext | None:
    """None for an invalid header, which the specification requires to be ignored."""
    match = TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    # Later versions may have more fields.
    if version == NO_VERSION or (version == FIRST_VERSION and more):
        return None
    trace, parent = int(trace_id, 16), int(parent_id, 16)
    return TraceContext(trace, parent, bool(int(flags, 16) & SAMPLED)) if trace and parent else None
