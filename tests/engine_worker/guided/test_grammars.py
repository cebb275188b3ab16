"""Masks of random grammars, for the whole vocabulary, compared with an Earley parser."""

import random
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest

from engine_worker.guided.matchers import compile_guide, load_tokens
from sluice.checkpoint.vocabulary import Vocabulary
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.earley import Parser, Symbol
from tests.engine_worker.guided.tools import TOKENIZER_FILE, VOCAB, tokenizer

TEXTS = ["a", " if", " in", "=", "_", "(", "é", "0", " self", "\n"]
BEGUN_BY_OTHERS = [*TEXTS, "self", "ab", "in"]
"""Texts that begin others, or that a class begins: the longest has precedence, so that fewer texts match."""
CLASSES = {"[a-z]": "abcdefghijklmnopqrstuvwxyz", "[0-9]": "0123456789", "[(+]": "(+", "[ab]": "ab"}


class Part(NamedTuple):
    text: str
    symbols: tuple[Symbol, ...]


class Grammar:
    """A random grammar, as text and as rules of the parser."""

    def __init__(self, rng: random.Random, texts: list[str], *, lark: bool) -> None:
        self._rng = rng
        self._texts = texts
        self._lark = lark
        self._names = ["root", "x", "y"][: rng.randrange(1, 4)]
        self._numbers = count()
        self.rules: dict[str, list[tuple[Symbol, ...]]] = {}
        lines = []
        for name in self._names:
            # The first alternative calls no rule, so that every rule matches some text.
            parts = [self._sequence(1, calls=i > 0) for i in range(rng.randrange(1, 4))]
            # The last alternative calls the rule itself, so that llguidance does not turn the rule into a terminal.
            parts.append(Part(f'"~" {self._shown(name)}', (frozenset(b"~"), name)))
            self.rules[name] = [part.symbols for part in parts]
            lines.append(f"{self._shown(name)} {':' if lark else '::='} " + " | ".join(part.text for part in parts))
        self.text = "\n".join(lines)

    def _shown(self, name: str) -> str:
        return "start" if self._lark and name == "root" else name

    def _sequence(self, depth: int, *, calls: bool) -> Part:
        parts = [self._part(depth, calls=calls) for _ in range(self._rng.randrange(1, 4))]
        return Part(" ".join(part.text for part in parts), sum((part.symbols for part in parts), ()))

    def _part(self, depth: int, *, calls: bool) -> Part:
        kinds = ["text", "class", *["rule"] * (2 * calls), *["choice", "repeated"] * depth]
        match self._rng.choice(kinds):
            case "text":
                text = self._rng.choice(self._texts)
                return Part('"' + text.replace("\n", "\\n") + '"', tuple(frozenset({each}) for each in text.encode()))
            case "class":
                name = self._rng.choice(list(CLASSES))
                return Part(f"/{name}/" if self._lark else name, (frozenset(CLASSES[name].encode()),))
            case "rule":
                name = self._rng.choice(self._names)
                return Part(self._shown(name), (name,))
            case "choice":
                parts = [self._sequence(depth - 1, calls=calls) for _ in range(self._rng.randrange(1, 4))]
                text = "(" + " | ".join(part.text for part in parts) + ")"
                return Part(text, (self._rule([part.symbols for part in parts]),))
            case _:
                part = self._sequence(depth - 1, calls=calls)
                how = self._rng.choice("?*+")
                return Part(f"({part.text}){how}", (self._repeated(part.symbols, how),))

    def _repeated(self, symbols: tuple[Symbol, ...], how: str) -> Symbol:
        if how == "?":
            return self._rule([symbols, ()])
        name = self._rule([])
        self.rules[name] += [(*symbols, name), symbols if how == "+" else ()]
        return name

    def _rule(self, alternatives: list[tuple[Symbol, ...]]) -> str:
        name = f"_{next(self._numbers)}"
        self.rules[name] = alternatives
        return name


class Trie:
    """A trie of the texts of tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.after: dict[int, Trie] = {}

    def add(self, text: bytes, token: int) -> None:
        node = self
        for byte in text:
            node = node.after.setdefault(byte, Trie())
        node.ids.append(token)

    def matching(self, parser: Parser) -> Iterator[int]:
        for byte, node in self.after.items():
            if parser.feed(byte):
                yield from node.ids
                yield from node.matching(parser)
                parser.undo()


@pytest.fixture(scope="module")
def tokens():
    return load_tokens(TOKENIZER_FILE, VOCAB)


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    vocabulary = Vocabulary(tokenizer())
    special = {vocabulary.tokenizer.token_to_id(each) for each in vocabulary.special}
    return [b"" if i in special else vocabulary.bytes_of(i) for i in range(VOCAB)]


@pytest.fixture(scope="module")
def trie(texts) -> Trie:
    vocabulary = Trie()
    for token, text in enumerate(texts):
        if text:
            vocabulary.add(text, token)
    return vocabulary


def check_masks(tokens, texts: list[bytes], trie: Trie, grammar: Grammar, rng: random.Random, *, exact: bool) -> bool:
    """Compare masks on a random walk; returns whether llguidance could follow it to its end."""
    matcher, parser = compile_guide(tokens.tokenizer, Guide(GuideKind.EBNF, grammar.text)), Parser(grammar.rules)
    output = b""
    for _ in range(8):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            assert "Too many items" in matcher.get_error()
            return False
        allowed, right = np.flatnonzero(bits[:VOCAB]).tolist(), sorted(trie.matching(parser))
        if exact:
            assert allowed == right, (grammar.text, output)
            assert bool(bits[tokens.end]) == parser.complete, (grammar.text, output)
        else:
            assert set(allowed) <= set(right), (grammar.text, output)
            assert bool(bits[tokens.end]) <= parser.complete, (grammar.text, output)
        if not allowed:
            break
        token = rng.choice(allowed)
        assert matcher.consume_token(token)
        assert all(map(parser.feed, texts[token]))
        output += texts[token]
    return True


def check_grammars(seeds: range, *oracles, given: list[str], lark: bool, exact: bool) -> None:
    ended = 0
    for seed in seeds:
        rng = random.Random(seed)
        ended += check_masks(*oracles, Grammar(rng, given, lark=lark), rng, exact=exact)
    assert ended > 0.9 * len(seeds)


@pytest.mark.parametrize("lark", [False, True], ids=["GBNF", "Lark"])
def test_masks_of_grammars(tokens, texts, trie, lark):
    check_grammars(range(30), tokens, texts, trie, given=TEXTS, lark=lark, exact=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lark", [False, True], ids=["GBNF", "Lark"])
def test_masks_of_many_grammars(tokens, texts, trie, lark):
    check_grammars(range(30, 200), tokens, texts, trie, given=TEXTS, lark=lark, exact=True)


def test_masks_are_subsets_where_one_text_begins_another(tokens, texts, trie):
    check_grammars(range(8), tokens, texts, trie, given=BEGUN_BY_OTHERS, lark=False, exact=False)
