"""Collects every invalid field of a request, so that the client sees all problems in one answer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration

from router.errors import RequestError, Violation, seconds

SHOWN_CHARACTERS = 64
LOGGED_CHARACTERS = 128


class Range(NamedTuple):
    """An interval that includes both ends; with `above` it excludes `low`."""

    low: float
    high: float
    above: bool = False

    def problem(self, value: float) -> str | None:
        """Why the value is out of range, or None. NaN and infinities always are."""
        if math.isfinite(value) and value <= self.high and (value > self.low if self.above else value >= self.low):
            return None
        return f"is {value:g}, must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


class Violations:
    """The invalid fields of one request."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str, private: bool = False) -> None:
        """`private`: the description quotes the caller's text and must not be logged."""
        self.found.append(Violation(field, description, private))

    def within(self, field: str, value: float, allowed: Range) -> None:
        problem = allowed.problem(value)
        if problem:
            self.add(field, problem)

    def at_most(self, field: str, count: int, limit: int, unit: str) -> bool:
        """Whether the count is within the limit."""
        if count > limit:
            self.add(field, f"has {count} {unit}, at most {limit} are allowed")
            return False
        return True

    def duration(self, field: str, value: Duration, most: float) -> float:
        """The duration in seconds; it must be positive and at most `most`."""
        found = seconds(value)
        if not 0 < found <= most:
            self.add(field, f"is {found:g} s, must be in (0, {most:g}] s")
        return found

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Report the first id outside the vocabulary."""
        # max() is ten times as fast as the loop below, and a prompt may have millions of ids.
        if max(ids, default=0) < vocab_size:
            return
        for i, token in enumerate(ids):
            if token >= vocab_size:
                self.add(f"{field}[{i}]", f"is {token}, the vocabulary has {vocab_size} tokens")
                return

    def id_set(self, field: str, ids: Sequence[int], limit: int, vocab_size: int) -> tuple[int, ...]:
        """The distinct ids, sorted; at most `limit` of them, all in the vocabulary."""
        if not self.at_most(field, len(ids), limit, "ids"):
            return ()
        self.token_ids(field, ids, vocab_size)
        return tuple(sorted(set(ids)))

    def raise_if_any(self) -> None:
        """Raises RequestError INVALID_ARGUMENT with every violation."""
        if self.found:
            raise RequestError.invalid(self.found)


def logged(text: str) -> str:
    """A caller's text made safe for a log line: printable and short. A valid request id is unchanged."""
    # ascii() escapes control characters, so a caller cannot forge log lines; [1:-1] drops its quotes.
    return ascii(text[:LOGGED_CHARACTERS])[1:-1]


def shown(value: object) -> str:
    """A caller's value made safe for an error message: printable and short."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"
