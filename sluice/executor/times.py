"""Lengths of time as callers give them: a timedelta, or a number."""

from datetime import timedelta
from typing import overload

Timeout = timedelta | float | None
"""A number is seconds; None: without end."""

Milliseconds = timedelta | float
"""A number is milliseconds, as in TensorRT-LLM."""


@overload
def in_seconds(value: timedelta | float) -> float: ...


@overload
def in_seconds(value: Timeout) -> float | None: ...


def in_seconds(value: Timeout) -> float | None:
    """Of a timeout."""
    return value.total_seconds() if isinstance(value, timedelta) else value


@overload
def as_timedelta(value: Milliseconds) -> timedelta: ...


@overload
def as_timedelta(value: Milliseconds | None) -> timedelta | None: ...


def as_timedelta(value: Milliseconds | None) -> timedelta | None:
    """Of milliseconds."""
    return value if value is None or isinstance(value, timedelta) else timedelta(milliseconds=value)
