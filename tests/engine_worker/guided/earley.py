"""An Earley parser over bytes (Earley 1970): which bytes a grammar allows next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Symbol = str | frozenset[int]
"""Name of a rule, or a set of bytes, of which one matches."""
Rules = Mapping[str, Sequence[tuple[Symbol, ...]]]
"""Alternatives of each rule. Every rule matches some text."""


class Item(NamedTuple):
    """An alternative of which a part has been read."""

    rule: str
    alternative: int
    read: int
    """Number of symbols read."""
    origin: int
    """Index of the byte at which the item began."""


class Items(NamedTuple):
    """All items after a byte."""

    reading: dict[frozenset[int], list[Item]]
    """Items whose next symbol is a set of bytes, by that set."""
    calling: dict[str, list[Item]]
    """Items whose next symbol is a rule, by its name."""
    complete: bool
    """Whether the text so far matches."""


class Parser:
    """The state after a prefix of a matching text."""

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
        """Read a byte; False, with no effect, if it cannot follow."""
        after = [_advanced(item) for each, items in self._chart[-1].reading.items() if byte in each for item in items]
        if after:
            self._chart.append(self._closed(after))
        return bool(after)

    def undo(self) -> None:
        """Undo the last byte that was read."""
        self._chart.pop()

    def _closed(self, items: list[Item]) -> Items:
        """All items that follow from `items` without reading a byte."""
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
            # An empty rule was skipped where it was called.
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
    """Names of the rules that match the empty text."""
    empty: set[str] = set()
    while new := {
        name
        for name, alternatives in rules.items()
        if name not in empty and any(all(symbol in empty for symbol in each) for each in alternatives)
    }:
        empty |= new
    return empty
