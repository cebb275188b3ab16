"""Search for stop strings in streamed text, including matches that span several pieces.

The match that ends first wins; of matches that end together, the longest. Text that may still become a stop string is
held back: the longest suffix that is a prefix of a stop string. If the output includes the stop string, nothing is
held back.

A stop string may contain special tokens that the text omits. In the search, a single character, the token's mark,
stands for each of them.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping

FIRST_MARK, MAX_MARKS = 0xD800, 0x800
"""Marks are surrogates, which no text contains."""


class StopStrings:
    """Aho-Corasick automaton over code points (Aho and Corasick 1975). State 0 is the root. Read-only, shared."""

    __slots__ = ("children", "depth", "erase", "fail", "first", "marks", "match")

    def __init__(self, stops: Iterable[str], omitted: Mapping[str, int] | None = None) -> None:
        """`omitted`: by text, the special tokens in stop strings that the text omits."""
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: length, in code points, of the prefix that the state represents."""
        self.fail = [0]
        """By state: the state of the longest proper suffix of its prefix."""
        self.match: list[tuple[str, int] | None] = [None]
        """By state: the longest stop string that ends in this state, and its length in the searched text."""
        by_text = {text: chr(FIRST_MARK + i) for i, text in enumerate([*(omitted or ())][:MAX_MARKS])}
        self.marks = {(omitted or {})[text]: mark for text, mark in by_text.items()}
        """Marks by token."""
        self.erase = str.maketrans(dict.fromkeys(by_text.values()))
        """Removes marks, as an argument of `str.translate`. Empty without marks."""
        for stop in stops:
            self._add(stop, stop)
            if by_text:
                self._add(_marked(stop, by_text), stop)
        self._link()
        self.first = frozenset(self.children[0])

    def walk(self, state: int, text: str, start: int) -> tuple[int, int]:
        """Read text[start:] from `state` on, until a stop string ends. Returns the state there and the next index."""
        # Amortized constant work per code point: following `fail` reduces the depth, and a character adds at most one.
        children, fail, match = self.children, self.fail, self.match
        for at in range(start, len(text)):
            char = text[at]
            while state and char not in children[state]:
                state = fail[state]
            state = children[state].get(char, 0)
            if match[state] is not None:
                return state, at + 1
        return state, len(text)

    def open_end(self, state: int) -> int:
        """The state of the longest suffix that can still grow into a longer stop string."""
        while state and not self.children[state]:
            state = self.fail[state]
        return state

    def _add(self, text: str, stop: str) -> None:
        """`text`: the stop string as it is searched for."""
        state = 0
        for char in text:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.match.append(None)
            state = self.children[state][char]
        if state:
            self.match[state] = (stop, len(text))

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]
            for char, child in self.children[state].items():
                self.fail[child], _ = self.walk(self.fail[state], char, 0)
                queue.append(child)


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    texts = sorted(marks, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, texts)), lambda found: marks[found[0]], stop)


class StopSearch:
    """The search in the text of one sequence."""

    __slots__ = ("_held", "_include", "_state", "_stops", "marks", "matched")

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self.marks = stops.marks
        """By token: its mark. Call `feed_mark` for these tokens."""
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, counts: bool) -> str:
        """Returns the text that may be shown now. While `counts` is false, a stop string is treated as other text."""
        # Fast path: no character begins a stop string, so the automaton would stay at the root.
        if not self._state and self._stops.first.isdisjoint(text):
            return text
        stops = self._stops
        state = self._state
        text, at = self._held + text, len(self._held)
        while at < len(text):
            state, at = stops.walk(state, text, at)
            match = stops.match[state]
            if match is not None:
                if counts:
                    return self._cut(text[:at], *match)
                state = stops.open_end(state)
        self._state = state
        # A mark is held back even then, because only a match decides whether its token is shown.
        if self._include and not stops.erase:
            return text
        shown = len(text) - stops.depth[state]
        self._held = text[shown:]
        return self._without_marks(text[:shown])

    def feed_mark(self, mark: str, counts: bool) -> str:
        """`feed`, for a special token that the text omits."""
        return self._without_marks(self.feed(mark, counts))

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        text, self._held, self._state = self._held, "", 0
        return self._without_marks(text)

    def _cut(self, text: str, stop: str, length: int) -> str:
        self.matched = stop
        self._held, self._state = "", 0
        if self._include and not self._stops.erase:
            return text
        return self._without_marks(text[: len(text) - length]) + (stop if self._include else "")

    def _without_marks(self, text: str) -> str:
        return text.translate(self._stops.erase) if self._stops.erase else text
