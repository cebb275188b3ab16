"""Separates the reasoning that a model writes before its answer, up to </think>."""

from collections.abc import Sequence

from gateway.parsers.parts import Parser, Part, Reasoning, UntilTag

BEGIN, END = "<think>", "</think>"
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show a tag there, even if the tokenizer splits the tag and its line breaks."""


def begun_by_prompt(tail: str, otherwise: bool) -> bool:
    """Whether an output begins within reasoning. Chat templates may write the tag, or a closed block to prevent
    reasoning. `tail`: end of the prompt; `otherwise`: the answer if there is no tag."""
    tail = tail.rstrip()
    return tail.endswith(BEGIN) or (otherwise and not tail.endswith(END))


def begun_by_text(text: str) -> bool:
    """Whether a continuation of this text begins within reasoning."""
    return text.rfind(BEGIN) > text.rfind(END)


class ReasoningParser:
    """Splits off the reasoning and passes the rest of the output to another parser."""

    def __init__(self, begun: bool, inner: Parser) -> None:
        """`begun`: the output begins within the reasoning even without <think>."""
        self._inner = inner
        self._begun = begun
        self._start: str | None = ""
        """The output so far; None once it is known whether it begins with reasoning."""
        self._until: UntilTag | None = None
        """Set while in the reasoning."""
        self._strips = False
        """Whether to drop the line breaks that come next, because they follow a tag."""

    def feed(self, text: str) -> Sequence[Part]:
        if self._start is not None:
            self._start += text
            stripped = self._start.lstrip()
            if BEGIN.startswith(stripped) and stripped != BEGIN:
                return ()
            text = self._begin(stripped)
        if self._until is not None:
            return self._reason(self._until, text)
        return self._answer(text)

    def end(self, cut: bool) -> Sequence[Part]:
        parts: list[Part] = []
        if self._start and not (cut and len(self._start.strip()) > 1):
            parts += self.feed(self._begin(self._start))
        if self._until is not None and (held := self._until.end(cut)):
            parts.append(Reasoning(held))
        return [*parts, *self._inner.end(cut)]

    def _begin(self, stripped: str) -> str:
        """Decide whether the output begins with reasoning. Returns the text after the tag, if there is a tag.

        `stripped`: the output so far, without leading white space.
        """
        start, self._start = self._start, None
        if stripped.startswith(BEGIN):
            self._until = UntilTag(END)
            self._strips = True
            return stripped.removeprefix(BEGIN)
        if self._begun:
            self._until = UntilTag(END)
            return stripped
        return start or stripped

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
