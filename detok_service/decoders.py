"""Incremental decoders, and the tables that they share, which are built from a tokenizer.json. The concatenated text
that a decoder returns equals the tokenizer's decoding of all tokens.

One decoder serves one sequence. `follow` takes the prompt, whose text is already shown; `feed` takes the next tokens
and returns the text that later tokens cannot change; `flush` returns the rest at the end of the sequence. The text does
not depend on how tokens are split into calls.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path

from tokenizers import Tokenizer

from sluice.checkpoint.vocabulary import REPLACEMENT, Family, Vocabulary
from sluice.wire.params import TextParams
from sluice.wire.rows import PROMPT_END_TOKENS

Pieces = Mapping[int, str | bytes]
"""Text by token id; `bytes` for a token that stands for one byte. Ids without text are absent."""
MAX_UNSETTLED = 16
"""Tokens after which a `WindowDecoder` stops waiting for the rest of a character."""
NOTHING = re.compile("(?!)")
"""Matches nothing."""


class TokenizerError(ValueError):
    """The file is not a usable tokenizer.json."""


class TextError(Exception):
    """The tokenizer could not decode some tokens."""


class BytesByToken(dict[int, bytes]):
    """Token id → bytes; empty for ids without text."""

    def __missing__(self, token: int) -> bytes:
        return b""


class ByteDecoder:
    """For byte-level tokenizers. Invalid UTF-8 becomes U+FFFD as soon as it is known to be invalid.

    Rust's from_utf8_lossy and Python's "replace" both write one U+FFFD for each maximal ill-formed subpart (The Unicode
    Standard, section 3.9).
    """

    __slots__ = ("_bytes_of", "_rest", "_text_of")

    def __init__(self, bytes_of: BytesByToken, text_of: Mapping[int, str]) -> None:
        """`text_of` has only tokens whose bytes are complete UTF-8 characters."""
        self._bytes_of = bytes_of
        self._text_of = text_of
        self._rest = b""

    def follow(self, prompt: Sequence[int]) -> None:
        """Begin after the prompt, of which the last PROMPT_END_TOKENS tokens are given."""
        # Only the beginning of a character at the end of the prompt affects the output.
        self.feed(prompt)

    def feed(self, tokens: Sequence[int]) -> str:
        rest = self._rest
        # Fast path for the usual step: one token that consists of complete characters.
        if not rest and len(tokens) == 1:
            text = self._text_of.get(tokens[0])
            if text is not None:
                return text
        data = rest + b"".join(map(self._bytes_of.__getitem__, tokens))
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text


class PieceDecoder:
    """For tokenizers whose tokens are pieces of text, or single bytes (SentencePiece's byte fallback).

    A run of byte tokens is text if the whole run is valid UTF-8, otherwise one U+FFFD per byte. So the run is held back
    until it ends or turns out to be invalid.
    """

    __slots__ = ("_first", "_pieces", "_run", "_strip", "_strip_left")

    def __init__(self, pieces: Pieces, first: Pieces | None = None, strip: str = "", strip_count: int = 0) -> None:
        """`first`: pieces to use for the first token of a sequence; None if they equal `pieces`. `strip`: a character
        that is removed from the start of the text, up to `strip_count` times."""
        self._pieces = pieces
        self._first = first
        self._strip = strip
        self._strip_left = strip_count
        self._run: _ByteRun | None = None

    def follow(self, prompt: Sequence[int]) -> None:
        """See `ByteDecoder.follow`."""
        if len(prompt) >= PROMPT_END_TOKENS:
            prompt = [*dropwhile(self._continues, prompt)]
            # The prompt has text, even if its last tokens have none.
            self._first, self._strip_left = None, 0
        self.feed(prompt)
        if self._run is not None:
            self._run = self._run.unfinished()

    def feed(self, tokens: Sequence[int]) -> str:
        out = []
        for token in tokens:
            piece = self._pieces.get(token)
            if piece is None:
                continue
            if self._first is not None:
                piece = self._first[token]
                self._first = None
            if isinstance(piece, bytes):
                if self._run is None:
                    self._run = _ByteRun()
                out.append(self._run.feed(piece))
                continue
            if self._run is not None:
                out.append(self._run.end())
                self._run = None
            out.append(piece)
        text = "".join(out)
        return self._stripped(text) if self._strip_left else text

    def flush(self) -> str:
        run, self._run = self._run, None
        return self._stripped(run.end()) if run is not None else ""

    def _continues(self, token: int) -> bool:
        """Whether the token is a byte of a character, but not its first byte."""
        piece = self._pieces.get(token)
        return isinstance(piece, bytes) and 0x80 <= piece[0] < 0xC0

    def _stripped(self, text: str) -> str:
        dropped = min(len(text) - len(text.lstrip(self._strip)), self._strip_left)
        # Stop stripping at the first other character.
        self._strip_left = self._strip_left - dropped if dropped == len(text) else 0
        return text[dropped:]


class _ByteRun:
    __slots__ = ("_length", "_rest", "_texts", "_valid")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._rest = b""
        self._length = 0
        self._valid = True

    def feed(self, byte: bytes) -> str:
        self._length += 1
        if not self._valid:
            return REPLACEMENT
        data = self._rest + byte
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._valid = False
            return REPLACEMENT * self._length
        self._texts.append(text)
        self._rest = data[used:]
        return ""

    def end(self) -> str:
        if not self._valid:
            return ""
        return REPLACEMENT * self._length if self._rest else "".join(self._texts)

    def unfinished(self) -> "_ByteRun | None":
        """The run without its complete characters. None if nothing is left."""
        if not self._valid:
            return self
        if not self._rest:
            return None
        run = _ByteRun()
        run._rest, run._length = self._rest, len(self._rest)
        return run


class WindowDecoder:
    """For all other tokenizers: decodes the latest tokens with and without the new one; the difference is its text.

    Exact if a token's text depends only on the tokens just before it. Text that ends in U+FFFD is held back for the
    rest of its character, but for at most MAX_UNSETTLED tokens, so the work per token is bounded.
    """

    __slots__ = ("_decode", "_known", "_settled", "_window")

    def __init__(self, decode: Callable[[list[int]], str], known: frozenset[int]) -> None:
        self._decode = decode
        self._known = known
        self._window: list[int] = []
        self._settled = 0
        """Tokens at the start of the window whose text has been returned."""

    def follow(self, prompt: Sequence[int]) -> None:
        """See `ByteDecoder.follow`."""
        self.feed(prompt)
        # Even the beginning of a character is already shown.
        self._settled = len(self._window)

    def feed(self, tokens: Sequence[int]) -> str:
        out = []
        for token in tokens:
            if token in self._known:
                self._window.append(token)
                text = self._new_text()
                if not text.endswith(REPLACEMENT) or len(self._window) - self._settled >= MAX_UNSETTLED:
                    out.append(text)
                    self._settle()
        return "".join(out)

    def flush(self) -> str:
        text = self._new_text()
        self._window.clear()
        self._settled = 0
        return text

    def _new_text(self) -> str:
        settled_text = self._decode(self._window[: self._settled]) if self._settled else ""
        return self._decode(self._window)[len(settled_text) :] if self._window else ""

    def _settle(self) -> None:
        del self._window[: self._settled]
        self._settled = len(self._window)


class FilteringDecoder:
    """Passes all but some tokens to another decoder."""

    __slots__ = ("_inner", "_omitted")

    def __init__(self, inner: "Decoder", omitted: frozenset[int]) -> None:
        self._inner = inner
        self._omitted = omitted

    def follow(self, prompt: Sequence[int]) -> None:
        """See `ByteDecoder.follow`."""
        self._inner.follow(self._rest_of(prompt))

    def feed(self, tokens: Sequence[int]) -> str:
        return self._inner.feed(self._rest_of(tokens))

    def flush(self) -> str:
        return self._inner.flush()

    def _rest_of(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._omitted]


Decoder = ByteDecoder | PieceDecoder | WindowDecoder | FilteringDecoder


@dataclass(frozen=True, slots=True)
class Decoders:
    """Makes a new decoder for each sequence."""

    kind: Family
    all_tokens: Callable[[], Decoder]
    without_special: Callable[[], Decoder]
    special: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by their text."""
    special_text: re.Pattern[str] = NOTHING
    """Matches the text of each special token."""

    def new(self, skip_special_tokens: bool, keep: Collection[str] = ()) -> Decoder:
        """`keep`: special tokens that are not skipped."""
        if not skip_special_tokens:
            return self.all_tokens()
        if not keep:
            return self.without_special()
        omitted = {number for token, number in self.special.items() if token not in keep}
        return FilteringDecoder(self.all_tokens(), frozenset(omitted))

    def omitted_in_stops(self, text: TextParams) -> dict[str, int]:
        """The special tokens that are part of a stop string although the output omits their text."""
        if not text.skip_special_tokens:
            return {}
        found = {token for stop in text.stop for token in self.special_text.findall(stop)}
        return {token: self.special[token] for token in found.difference(text.keep_special_tokens)}


def load_decoders(file: Path) -> Decoders:
    """Read a tokenizer.json. Raises TokenizerError."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} is not a tokenizer.json: {error}") from error
    return decoders_of(tokenizer)


def decoders_of(tokenizer: Tokenizer) -> Decoders:
    vocabulary = Vocabulary(tokenizer)
    tokens, special = vocabulary.tokens, vocabulary.special
    plain = {number: token for number, token in tokens.items() if token not in special}
    return Decoders(
        vocabulary.reading.family,
        _build(vocabulary, tokens),
        _build(vocabulary, plain),
        {token: number for number, token in tokens.items() if token in special},
        _any_of(special),
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches each of these texts, the longest first."""
    escaped = [re.escape(text) for text in sorted(texts, key=len, reverse=True) if text]
    return re.compile("|".join(escaped)) if escaped else NOTHING


def _build(vocabulary: Vocabulary, tokens: dict[int, str]) -> Callable[[], Decoder]:
    reading = vocabulary.reading
    if reading.piece is None:
        return partial(WindowDecoder, partial(_decode, vocabulary.tokenizer), frozenset(tokens))
    pieces = {number: reading.piece(token) for number, token in tokens.items()}
    if reading.family == "bytes":
        return partial(ByteDecoder, *_byte_tables(pieces))
    first = None if reading.first is None else {number: reading.first(token) for number, token in tokens.items()}
    return partial(PieceDecoder, pieces, first, reading.strip, reading.strip_count)


def _byte_tables(pieces: Pieces) -> tuple[BytesByToken, dict[int, str]]:
    bytes_of = BytesByToken()
    text_of = {}
    for number, piece in pieces.items():
        data = bytes_of[number] = piece if isinstance(piece, bytes) else piece.encode()
        try:
            text_of[number] = data.decode()
        except UnicodeDecodeError:
            continue
    return bytes_of, text_of


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    try:
        # If special tokens are to be skipped, they are not in the WindowDecoder's `known` and never get here.
        return str(tokenizer.decode(tokens, skip_special_tokens=False))
    except BaseException as error:
        # A panic in the library's Rust code is a BaseException in Python.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise TextError(f"the tokenizer raised {type(error).__name__}") from error
