"""Tokens that may not come next, because they would complete something that is not allowed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from engine_worker.sampling.rules import Edits
from engine_worker.sampling.seen import PromptTokens, SeenTokens

Ngram = tuple[int, ...]


class WordNode:
    """Of a tree of words without their last tokens, from the end to the start."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, WordNode] = {}
        """By the token before those on the path to this node."""
        self.last: list[int] = []
        """Last tokens of the words whose other tokens are those on the path."""


class BadWords:
    """No word of several tokens is completed, also not one that the prompt begins (as transformers'
    NoBadWordsLogitsProcessor). Has no state, so all sequences of a request share one."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: each of two tokens or more; those of a single one are `bad_token_ids`."""
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
            found = node.before.get(token)
            if found is None:
                break
            node = found
            banned += node.last
        if banned:
            edits.banned.append(np.array(banned))


class NoRepeatTokens:
    """No token comes twice: `NoRepeatNgrams` of size 1."""

    def __init__(self, prompt: PromptTokens) -> None:
        self._seen = SeenTokens(prompt)

    def feed(self, tokens: list[int]) -> None:
        self._seen.add(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        self._seen.remove(tokens[-1])

    def edit(self, _tokens: list[int], edits: Edits) -> None:
        edits.banned.append(self._seen.ids.copy())


def index_ngrams(tokens: Sequence[int], size: int, vocab_size: float = inf) -> dict[Ngram, list[int]]:
    """The distinct tokens after each sequence of size - 1 tokens, of those below `vocab_size` alone."""
    found: dict[Ngram, list[int]] = defaultdict(list)
    ngrams = dict.fromkeys(zip(*(tokens[i:] for i in range(size)), strict=False))
    virtual = max(tokens, default=0) >= vocab_size
    for ngram in ngrams:
        if not virtual or max(ngram) < vocab_size:
            found[ngram[:-1]].append(ngram[-1])
    return found


class NoRepeatNgrams:
    """No `size` consecutive tokens come twice in prompt and output (as transformers' NoRepeatNGramLogitsProcessor)."""

    def __init__(self, size: int, prompt: Mapping[Ngram, list[int]]) -> None:
        """`size`: at least 2. `prompt`: its n-grams, from `index_ngrams`; shared by all sequences of a request."""
        self._size = size
        self._prompt = prompt
        self._output: dict[Ngram, list[int]] = defaultdict(list)
        """N-grams that end in the output."""

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
