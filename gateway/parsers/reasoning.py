"""Reasoning that a model writes before its answer, up to </think>."""

from collections.abc import Sequence

from gateway.parsers.parts import Parser, Part, Reasoning, UntilTag

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Passes what follows the reasoning to another parser.

    `begun`: the output begins within the reasoning, with or without <think>, as the chat template has written it.
    """

    def __init__(self, begun: bool, inner: Parser) -> None:
        self._inner = inner
        self._begun = begun
        self._start: str | None = ""
        """The output so far; None once it is known how it begins."""
        self._until: UntilTag | None = None
        """While in the reasoning."""
        self._strips = False
        """Line breaks that come next belong to the tag before them."""

    def feed(self, text: str) -> Sequence[Part]:
        if self._start is not None:
            self._start += text
            found = self._start.lstrip()
            if BEGIN.startswith(found) and found != BEGIN:
                return ()
            text = self._begin(found)
        if self._until is not None:
            return self._reason(self._until, text)
        return self._answer(text)

    def end(self) -> Sequence[Part]:
        parts: list[Part] = []
        if self._start:
            parts += self.feed(self._begin(self._start))
        if self._until is not None and (held := self._until.end()):
            parts.append(Reasoning(held))
        return [*parts, *self._inner.end()]

    def _begin(self, found: str) -> str:
        """Decide how the output begins; returns the text that is left. `found`: the output without leading blanks."""
        start, self._start = self._start, None
        if found.startswith(BEGIN):
            self._until = UntilTag(END)
            self._strips = True
            return found.removeprefix(BEGIN)
        if self._begun:
            self._until = UntilTag(END)
            return found
        return start or found

    def _reason(self, until: UntilTag, text: str) -> Sequence[Part]:
        before, after = until.feed(text)
        before = self._stripped(before)
        parts: list[Part] = [Reasoning(before)] if before else []
        if after is not None:
            self._until, self._strips = None, True
            parts += self._answer(after)
        return parts

    def _answer(self, text: str) -> Sequence[Part]:
        return self._inner.feed(self._stripped(text))

    def _stripped(self, text: str) -> str:
        if self._strips:
            text = text.lstrip("\n")
            self._strips = not text
        return text
