"""The parts of a model's output: text, reasoning and tool calls."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """The start of a tool call; its arguments follow, as JSON."""

    call: int
    """Number of the call within its output."""
    id: str
    name: str


class CallArguments(NamedTuple):
    call: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class Parser(Protocol):
    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are certain; text that may still be parsed differently is held back."""

    def end(self, cut: bool) -> Sequence[Part]:
        """The parts that were held back. Called once the text is complete.

        `cut`: the output was cut short, for example by max_tokens. What is then held back is the beginning of a tag and
        not shown, except for a single character, which is more often text.
        """


class PlainText:
    """A parser that passes everything on as text."""

    def feed(self, text: str) -> Sequence[Part]:
        return (Text(text),) if text else ()

    def end(self, cut: bool) -> Sequence[Part]:  # noqa: ARG002 - nothing is held back
        return ()


class UntilTag:
    """Finds a tag that may arrive in pieces, and passes on the text before it."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is certain to precede the tag, and the text after the tag; None if the tag has not occurred."""
        text = self._held + text
        before, tag, after = text.partition(self._tag)
        if tag:
            self._held = ""
            return before, after
        overlap = _overlap(text, self._tag)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap], None

    def end(self, cut: bool) -> str:
        held, self._held = self._held, ""
        return "" if cut and len(held) > 1 else held


def _overlap(text: str, tag: str) -> int:
    """Number of characters at the end of the text that may be the beginning of the tag."""
    # Fast path: most pieces do not contain the tag's first character.
    if tag[0] not in text[1 - len(tag) :]:
        return 0
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
