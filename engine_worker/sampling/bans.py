"""Rules that ban the tokens which would complete a bad word or a repeated n-gram."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from engine_worker.sampling.rules import Edits
from engine_worker.sampling.seen import PromptTokens, SeenTokens

Ngram = tuple[int, ...]


class WordNode:
    """Node of a trie of words without their last token, read from end to start."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, WordNode] = {}
        """Children, by the token that precedes the path to this node."""
        self.last: list[int] = []
        """Last tokens of the words whose other tokens are exactly the path to this node."""


class BadWords:
    """Bans the last token of each bad word whose other tokens have just been generated, or end the prompt, as
    transformers' NoBadWordsLogitsProcessor. Has no state, so all sequences of a request share one."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: of two or more tokens each; words of one token are in `bad_token_ids`."""
        self._root = WordNode()
        for word in words:
            node = self._root
            for token in reversed(word[:-1]):
                node = node.before.setdefault(token, WordNode())
            node.last.append(word[-1])

    def feed(self, tokens: list[int]) -> None:
        pass

    def undo(self, tokens: list[int]) -> None:
        pass

    def edit(self, tokens: list[int], edits: Edits) -> None:
        banned: list[int] = []
        node = self._root
        for token in reversed(tokens):
            child = node.before.get(token)
            if child is None:
                break
            node = child
            banned += node.last
        if banned:
            edits.banned.append(np.array(banned))


class NoRepeatTokens:
    """Bans every token of prompt and output: `NoRepeatNgrams` of size 1."""

    def __init__(self, prompt: PromptTokens) -> None:
        self._seen = SeenTokens(prompt)

    def feed(self, tokens: list[int]) -> None:
        self._seen.add(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        self._seen.remove(tokens[-1])

    def edit(self, _tokens: list[int], edits: Edits) -> None:
        edits.banned.append(self._seen.ids.copy())


def index_ngrams(tokens: Sequence[int], size: int, vocab_size: float = inf) -> dict[Ngram, list[int]]:
    """The distinct tokens that follow each sequence of size - 1 tokens. N-grams with virtual tokens, whose ids are
    `vocab_size` or more, are skipped."""
    followers: dict[Ngram, list[int]] = defaultdict(list)
    ngrams = dict.fromkeys(zip(*(tokens[i:] for i in range(size)), strict=False))
    has_virtual = max(tokens, default=0) >= vocab_size
    for ngram in ngrams:
        if not has_virtual or max(ngram) < vocab_size:
            followers[ngram[:-1]].append(ngram[-1])
    return followers


class NoRepeatNgrams:
    """Bans tokens that would repeat `size` consecutive tokens of prompt and output, as transformers'
    NoRepeatNGramLogitsProcessor."""

    def __init__(self, size: int, prompt: Mapping[Ngram, list[int]]) -> None:
        """`size`: at least 2. `prompt`: the prompt's n-grams from `index_ngrams`, shared by all sequences of a
        request."""
        self._size = size
        self._prompt = prompt
        self._output: dict[Ngram, list[int]] = defaultdict(list)
        """N-grams that end in the output, as in `index_ngrams`."""

    def feed(self, tokens: list[int]) -> None:
        if len(tokens) >= self._size:
            self._output[tuple(tokens[-self._size : -1])].append(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        if len(tokens) >= self._size:
            self._output[tuple(tokens[-self._size : -1])].pop()

    def edit(self, tokens: list[int], edits: Edits) -> None:
        start = tuple(tokens[-self._size + 1 :])
        banned = [*self._prompt.get(start, ()), *self._output.get(start, ())]
        if banned:
            edits.banned.append(np.array(banned))
