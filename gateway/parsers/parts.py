"""What the text of a model consists of."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """A tool call; its arguments follow, as JSON."""

    call: int
    """Its number."""
    id: str
    name: str


class CallArguments(NamedTuple):
    call: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class Parser(Protocol):
    def feed(self, text: str) -> Sequence[Part]:
        """What is certain so far; the rest is held back."""

    def end(self) -> Sequence[Part]:
        """What was held back: no more text comes."""


class PlainText:
    """A parser that finds nothing."""

    def feed(self, text: str) -> Sequence[Part]:
        return (Text(text),) if text else ()

    def end(self) -> Sequence[Part]:
        return ()


class UntilTag:
    """Text up to a tag, which may come in pieces."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text before the tag that is certain, and what follows the tag; None: it has not come yet."""
        text = self._held + text
        before, tag, after = text.partition(self._tag)
        if tag:
            self._held = ""
            return before, after
        kept = _overlap(text, self._tag)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, tag: str) -> int:
    """How much of the end of the text may be the beginning of the tag."""
    # Most pieces have no such character at all.
    if tag[0] not in text[1 - len(tag) :]:
        return 0
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
