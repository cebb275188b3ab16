"""The guide worker's state: the tokenizer, compiled grammars, and a matcher for each sequence."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_worker.guided.grammars import grammar_of, numbered_tokens
from engine_worker.guided.memory import WORD_BITS, MaskMemory
from engine_worker.guided.messages import MAX_COMPILED, Key, Row, RowResult
from sluice.wire.params import Guide, GuideKind

END = "<|end of guided text|>"
MAX_MESSAGE = 600
"""Limit on the characters of an error message of llguidance."""
POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""At the start of an error message: the position in the grammar."""
QUOTED = re.compile(r"\n +\d+ \| ")
"""In an error message: the start of a quoted line of the grammar."""
LIMIT_MESSAGES = {
    "lexer precomputation failed": "its regular expressions have too many states together",
    "Unable to determine if regex is empty": "its regular expressions have too many states together",
    "panic: assertion failed: grammar.symbols.len()": "it has too many rules",
    "maximum recursion depth exceeded": "it is nested too deeply",
}
"""Beginnings of error messages about llguidance's or Python's own limits, and what they mean."""
LIMITS = LLParserLimits(verbose_errors=False)


class Tokens(NamedTuple):
    tokenizer: LLTokenizer
    end: int
    """The id that marks a complete output in masks: an additional one, which the model does not have."""
    size: int
    """Ids in a mask."""
    special: frozenset[int]
    """Ids of special tokens, which are never text: a mask allows one only where the grammar names it."""


def load_tokens(file: Path, vocab_size: int) -> Tokens:
    """The tokens of a tokenizer.json. `vocab_size`: the model's; ids without a token are never allowed. Raises
    ValueError."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    added = document.setdefault("added_tokens", [])
    vocab = document["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    end = 1 + max((*ids, *(token["id"] for token in added)))
    # With this additional end token llguidance treats all special tokens of the model alike, and the request decides
    # which ids end a sequence.
    special = frozenset(token["id"] for token in added if token.get("special"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added.append({"id": end, "content": END, **flags})
    size = max(vocab_size, end + 1)
    return Tokens(LLTokenizer(json.dumps(document), n_vocab=size, eos_token=end), end, size, special)


class GuideError(ValueError):
    """The guide is invalid; the message says why."""


def compile_guide(tokenizer: LLTokenizer, guide: Guide, *, close: bool = False) -> LLMatcher:
    """A matcher whose first mask has been computed, which may take as long as compiling. `close`: see the setting
    `guided_closed_objects`. Raises GuideError."""
    try:
        special = [text for text in guide.shown_tokens if _is_special(tokenizer, text)]
        grammar = grammar_of(guide, special, close=close)
    except MemoryError:
        raise
    except Exception as error:  # llguidance's converters raise exceptions of many types
        raise GuideError(shortened(_plain(str(error)) or type(error).__name__)) from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GuideError(shortened(_without_quotes(guide, matcher.get_error())))
    return matcher


def _is_special(tokenizer: LLTokenizer, text: str) -> bool:
    ids = tokenizer.tokenize_str(text)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _without_quotes(guide: Guide, message: str) -> str:
    """The message without quotes of the grammar, unless the caller wrote the grammar."""
    message = _plain(message)
    if message.startswith("NoExtension"):
        return "no text matches it"
    if guide.kind is GuideKind.EBNF:
        return message
    return QUOTED.split(POSITION.sub("", message), maxsplit=1)[0]


def _plain(message: str) -> str:
    """The message without llguidance's advice about its own options and without the backtrace of a crash."""
    message = message.strip().removesuffix("<non-verbose/>").partition("\n<backtrace>")[0]
    start = POSITION.sub("", message)
    return next((reason for limit, reason in LIMIT_MESSAGES.items() if start.startswith(limit)), message)


def shortened(message: str) -> str:
    message = message.strip()
    # From the middle, which is where it may quote the guide.
    half = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:half]} … {message[-half:]}"


class MatcherState(NamedTuple):
    """A matcher and the number of tokens that it has consumed: a compiled guide's, of which sequences get copies, or a
    sequence's."""

    matcher: LLMatcher
    consumed: int
    numbered: tuple[range, ...]
    """See `numbered_tokens`."""


class Matchers:
    def __init__(self, tokens: Tokens, *, close: bool = False) -> None:
        self._tokens = tokens
        self._close = close
        self._compiled: OrderedDict[Key, MatcherState] = OrderedDict()
        """The most recently used guides, at most MAX_COMPILED, each at the start of the output."""
        self._lock = threading.Lock()
        """Protects `_compiled`, which two threads use."""
        self._states: dict[int, MatcherState] = {}
        """By sequence number."""

    def compile(self, key: Key, guide: Guide) -> None:
        """Compile a guide unless it is compiled already. Called in either thread. Raises GuideError."""
        if self._find(key) is not None:
            return
        matcher = compile_guide(self._tokens.tokenizer, guide, close=self._close)
        compiled = MatcherState(matcher, 0, numbered_tokens(guide))
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def has(self, key: Key) -> bool:
        return self._find(key) is not None

    def _find(self, key: Key) -> MatcherState | None:
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def release(self, sequences: list[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)

    def mask(self, row: Row, memory: MaskMemory, never: Sequence[int]) -> RowResult | None:
        """Compute the mask of a row and write it to the row's slot. Returns None if that succeeded. `never`: see
        ComputeMasks."""
        state = self._rolled_back(row)
        if state is None:
            return RowResult(0, known=False)
        matcher, consumed, numbered = state
        if consumed == row.keep and row.tokens:
            consumed += matcher.try_consume_tokens(row.tokens)
        self._states[row.sequence] = MatcherState(matcher, consumed, numbered)
        allowed = not matcher.is_error() and consumed == row.keep + len(row.tokens)
        if allowed:
            matcher.unsafe_compute_mask_ptr(memory.address(row.slot), memory.mask_bytes)
        if matcher.is_error():
            del self._states[row.sequence]
            return RowResult(consumed, error=shortened(_plain(matcher.get_error())))
        if not allowed:
            return RowResult(consumed)
        mask, ends = memory.mask(row.slot), row.ends
        complete = write_ends(mask, self._tokens, ends, never, numbered, may_end=row.may_end)
        return RowResult(consumed, complete=True) if complete else None

    def _rolled_back(self, row: Row) -> MatcherState | None:
        """The sequence's matcher after the first `row.keep` tokens, or after fewer if the grammar does not allow all of
        them. None if the worker lacks the guide or the tokens."""
        if row.guide is not None or (row.keep == 0 and row.sequence not in self._states):
            compiled = self._find(row.key)
            return None if compiled is None else compiled._replace(matcher=compiled.matcher.deep_copy())
        state = self._states.get(row.sequence)
        if state is None or state.consumed <= row.keep:
            return state
        state.matcher.rollback(state.consumed - row.keep)
        return state._replace(consumed=row.keep)


def write_ends(
    mask: memoryview,
    tokens: Tokens,
    ends: Sequence[int],
    never: Sequence[int],
    numbered: Sequence[range] = (),
    *,
    may_end: bool,
) -> bool:
    """Allow or forbid end ids in a mask. Returns whether the output is complete: no token can follow, and there is no
    end id to sample.

    mask: uint32 words. ends: ids that end the sequence; they are forbidden unless `may_end` (min_tokens). never: other
    ids that must not be sampled as text. numbered: ids that the grammar names by number. An id of `ends` or `never`
    stays allowed where the grammar names it: where it allows a special token, which is never text, or an id in
    `numbered`. Ids beyond the mask are ignored.
    """
    complete, given = _has(mask, tokens.end), (*ends, *never)
    named = [
        token
        for token in given
        if (token in tokens.special or any(token in ids for ids in numbered)) and _has(mask, token)
    ]
    _clear(mask, (*given, tokens.end))
    _set(mask, named if may_end else [token for token in named if token not in ends])
    if complete and may_end:
        _set(mask, ends)
    return (complete or bool(named)) and not (ends and may_end) and not any(mask)


def _has(mask: memoryview, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return word < len(mask) and bool(mask[word] >> bit & 1)


def _clear(mask: memoryview, ids: Collection[int]) -> None:
    for token in ids:
        word, bit = divmod(token, WORD_BITS)
        if word < len(mask):
            mask[word] &= ~(1 << bit)


def _set(mask: memoryview, ids: Collection[int]) -> None:
    for token in ids:
        word, bit = divmod(token, WORD_BITS)
        if word < len(mask):
            mask[word] |= 1 << bit
