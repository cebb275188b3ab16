"""An Earley parser over bytes (Earley 1970): which bytes can come next, by nothing but the definition of a grammar."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Symbol = str | frozenset[int]
"""Name of a rule, or the bytes of which one is meant."""
Rules = Mapping[str, Sequence[tuple[Symbol, ...]]]
"""Each with its alternatives. Every rule can become a text."""


class Item(NamedTuple):
    """A part of an alternative that has been read."""

    rule: str
    alternative: int
    read: int
    """Symbols."""
    origin: int
    """Byte at which it began."""


class Items(NamedTuple):
    """All that may be going on after a byte."""

    reading: dict[frozenset[int], list[Item]]
    """By the bytes of which one is next."""
    calling: dict[str, list[Item]]
    """By the rule that is next."""
    complete: bool
    """Whether the whole text is."""


class Parser:
    """Where it stands after a text that some text of the grammar begins with."""

    def __init__(self, rules: Rules, start: str = "root") -> None:
        self._rules = rules
        self._start = start
        self._empty = _empty_rules(rules)
        self._chart: list[Items] = []
        self._chart.append(self._closed([Item(start, i, 0, 0) for i in range(len(rules[start]))]))

    @property
    def complete(self) -> bool:
        return self._chart[-1].complete

    def feed(self, byte: int) -> bool:
        """Whether it can come next; it is not read otherwise."""
        after = [_advanced(item) for each, items in self._chart[-1].reading.items() if byte in each for item in items]
        if after:
            self._chart.append(self._closed(after))
        return bool(after)

    def undo(self) -> None:
        """The last byte that was read."""
        self._chart.pop()

    def _closed(self, items: list[Item]) -> Items:
        """With what these begin and complete."""
        here = Items({}, {}, complete=False)
        known, waiting = set(items), [*items]
        while waiting:
            item = waiting.pop()
            new = [each for each in self._followers(item, here) if each not in known]
            known.update(new)
            waiting += new
        return here._replace(complete=any(self._ends(item) for item in known))

    def _followers(self, item: Item, here: Items) -> list[Item]:
        symbols, place = self._rules[item.rule][item.alternative], len(self._chart)
        if item.read == len(symbols):
            # What is empty was skipped where it was called.
            callers = [] if item.origin == place else self._chart[item.origin].calling.get(item.rule, [])
            return list(map(_advanced, callers))
        symbol = symbols[item.read]
        if isinstance(symbol, frozenset):
            here.reading.setdefault(symbol, []).append(item)
            return []
        callers = here.calling.setdefault(symbol, [])
        callers.append(item)
        begun = [Item(symbol, i, 0, place) for i in range(len(self._rules[symbol]))] if len(callers) == 1 else []
        return [*begun, _advanced(item)] if symbol in self._empty else begun

    def _ends(self, item: Item) -> bool:
        symbols = self._rules[item.rule][item.alternative]
        return (item.rule, item.origin, item.read) == (self._start, 0, len(symbols))


def _advanced(item: Item) -> Item:
    return item._replace(read=item.read + 1)


def _empty_rules(rules: Rules) -> set[str]:
    """Those that can be the empty text."""
    found: set[str] = set()
    while new := {
        name
        for name, alternatives in rules.items()
        if name not in found and any(all(symbol in found for symbol in each) for each in alternatives)
    }:
        found |= new
    return found
