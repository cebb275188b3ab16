"""The rules that `logit_rules` consists of: penalties and bans. Each edits the next logits depending on the tokens so
far."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.wire.params import SamplingParams

LEAST_GROWTH = 16
"""Slots that `SeenTokens` adds at once, at least."""

Ngram = tuple[int, ...]


class Penalized(NamedTuple):
    """P tokens, at least one: positive logits are divided and negative ones multiplied by `repetition`, then `amounts`
    are subtracted."""

    ids: NDArray[np.int64]
    """[P], distinct."""
    repetition: float
    amounts: NDArray[np.float32] | None
    """[P]; None: zeros."""


class Edits(msgspec.Struct, eq=False):
    """Edits of one row of logits."""

    banned: list[NDArray[np.int64]] = []
    """Token ids, possibly repeated."""
    penalized: Penalized | None = None

    def __bool__(self) -> bool:
        return bool(self.banned) or self.penalized is not None


class Rule(Protocol):
    """One feature of one sequence. Its state is a function of the tokens that it was fed.

    `tokens`: the last tokens of the prompt, as many as any rule reads, and all output tokens so far.
    """

    def feed(self, tokens: list[int]) -> None:
        """The last of `tokens` is new."""

    def undo(self, tokens: list[int]) -> None:
        """The last of `tokens`, which was fed last, is about to be removed."""

    def edit(self, tokens: list[int], edits: Edits) -> None:
        """Add the edits for the next token. What is added must not change later."""


class PromptTokens:
    """The distinct tokens of a prompt; shared by all sequences of a request."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: NDArray[np.int64] = np.unique(np.fromiter(prompt, np.int64, len(prompt)))
        """[P], ascending."""
        self.slots = {token: slot for slot, token in enumerate(self.ids.tolist())}


class SeenTokens:
    """Distinct tokens of prompt and output, in slots 0 to size - 1, each with the penalty for its occurrences in the
    output: presence + count * frequency."""

    def __init__(self, prompt: PromptTokens, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt = prompt
        self._presence, self._frequency = presence, frequency
        self._counts: dict[int, int] = {}
        """Occurrences of each token in the output."""
        self._slots: dict[int, int] = {}
        """Slots of the tokens that only the output has."""
        self._size = len(prompt.ids)
        # Shared with other sequences. The first token that the prompt lacks replaces it by a larger copy.
        self._ids = prompt.ids
        self._amounts = np.zeros(self._size, np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[size]; valid until the next change."""
        return self._ids[: self._size]

    @property
    def amounts(self) -> NDArray[np.float32]:
        """[size]: penalties of `ids`; valid until the next change."""
        return self._amounts[: self._size]

    def add(self, token: int) -> None:
        """Count one more occurrence in the output."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._prompt.slots.get(token)
        if slot is None:
            slot = self._new_slot(token)
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._amounts[slot] = self._amount(count)

    def remove(self, token: int) -> None:
        """Undo the latest `add`, which must have added this token."""
        count = self._counts[token] = self._counts[token] - 1
        slot = self._slots.get(token)
        if count or slot is None:
            self._amounts[self._prompt.slots[token] if slot is None else slot] = self._amount(count)
        else:
            # The token that was added last has the last slot.
            del self._slots[token]
            self._size -= 1

    def _amount(self, count: int) -> float:
        return self._presence + self._frequency * count if count else 0.0

    def _new_slot(self, token: int) -> int:
        slot = self._slots[token] = self._size
        if slot == len(self._ids):
            more = max(LEAST_GROWTH, slot)
            self._ids = np.concatenate((self._ids, np.zeros(more, np.int64)))
            self._amounts = np.concatenate((self._amounts, np.zeros(more, np.float32)))
        self._ids[slot] = token
        self._size += 1
        return slot


class Penalties:
    """The repetition penalty for tokens of prompt and output (CTRL, arXiv:1909.05858), which does not grow with the
    number of occurrences; presence + count * frequency for tokens of the output, as in OpenAI's API."""

    def __init__(self, sampling: SamplingParams, prompt: PromptTokens) -> None:
        self._repetition = sampling.repetition_penalty
        self._counting = bool(sampling.presence_penalty or sampling.frequency_penalty)
        # Without a repetition penalty, tokens of the prompt are not penalized.
        seen = PromptTokens(()) if self._repetition == 1.0 else prompt
        self._seen = SeenTokens(seen, sampling.presence_penalty, sampling.frequency_penalty)

    def feed(self, tokens: list[int]) -> None:
        self._seen.add(tokens[-1])

    def undo(self, tokens: list[int]) -> None:
        self._seen.remove(tokens[-1])

    def edit(self, _tokens: list[int], edits: Edits) -> None:
        ids = self._seen.ids
        if len(ids):
            amounts = self._seen.amounts.copy() if self._counting else None
            edits.penalized = Penalized(ids.copy(), self._repetition, amounts)


class WordNode:
    """Node of a trie of words without their last token, read from end to start."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, WordNode] = {}
        """Children, by the token that precedes the path to this node."""
        self.last: list[int] = []
        """Last tokens of the words whose other tokens are exactly the path to this node."""


class BadWords:
    """Bans the last token of each bad word whose other tokens have just been generated, or end the prompt, like
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
    """Bans tokens that would repeat `size` consecutive tokens of prompt and output, like transformers'
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
