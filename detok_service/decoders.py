"""The decoders of a tokenizer.json. All sequences share the tables that `load_decoders` builds."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from detok_service.decoder import (
    ByteDecoder,
    BytesByToken,
    Decoder,
    FilteringDecoder,
    PieceDecoder,
    Pieces,
    TextError,
    WindowDecoder,
)
from sluice.checkpoint.vocabulary import Family, Vocabulary
from sluice.wire.params import TextParams

NOTHING = re.compile("(?!)")
"""Matches nothing."""


class TokenizerError(ValueError):
    """The file is not a usable tokenizer.json."""


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
