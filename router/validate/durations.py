"""Spans of time, as seconds."""

from google.protobuf.duration_pb2 import Duration

from router.validate.violations import Violations


def seconds(duration: Duration) -> float:
    """A protobuf duration as a number."""
    return duration.seconds + duration.nanos / 1e9


def bounded_seconds(field: str, duration: Duration, most: float, bad: Violations) -> float:
    """One that must be greater than zero and at most `most` seconds."""
    found = seconds(duration)
    if not 0 < found <= most:
        bad.add(field, f"is {found:g} s, must be in (0, {most:g}] s")
    return found
