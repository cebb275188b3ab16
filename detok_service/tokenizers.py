"""Loads tokenizer.json and builds the tables of the decoders in decoder.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from detok_service.decoder import (
    ByteDecoder,
    BytesByToken,
    ByteTable,
    Decoder,
    PieceDecoder,
    PieceTable,
    TextError,
    WindowDecoder,
)
from sluice.ring.vocabulary import Family, Vocabulary


class TokenizerError(ValueError):
    """The file is not a usable tokenizer.json."""


@dataclass(frozen=True, slots=True)
class Decoders:
    """Makes a new decoder for each sequence."""

    kind: Family
    all_tokens: Callable[[], Decoder]
    without_special: Callable[[], Decoder]

    def new(self, skip_special_tokens: bool) -> Decoder:
        return self.without_special() if skip_special_tokens else self.all_tokens()


def load_decoders(file: Path) -> Decoders:
    """Read a tokenizer.json. Raises TokenizerError."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} is not a tokenizer.json: {error}") from error
    return decoders_of(tokenizer)


def decoders_of(tokenizer: Tokenizer) -> Decoders:
    """Depending on the tokenizer's own decoder: a byte table, a piece table, or the library over a window of tokens."""
    vocabulary = Vocabulary(tokenizer)
    tokens = vocabulary.tokens
    special = vocabulary.special
    plain = {number: token for number, token in tokens.items() if token not in special}
    build = partial(_build, vocabulary)
    return Decoders(vocabulary.reading.family, build(tokens), build(plain))


def _build(vocabulary: Vocabulary, tokens: dict[int, str]) -> Callable[[], Decoder]:
    reading = vocabulary.reading
    if reading.piece is None:
        return _window(vocabulary.tokenizer, frozenset(tokens))
    pieces = {number: reading.piece(token) for number, token in tokens.items()}
    if reading.family == "bytes":
        byte_table = _byte_table(pieces)
        return lambda: ByteDecoder(byte_table)
    first = None if reading.first is None else {number: reading.first(token) for number, token in tokens.items()}
    piece_table = PieceTable(pieces, first, reading.strip, reading.strip_count)
    return lambda: PieceDecoder(piece_table)


def _byte_table(pieces: Mapping[int, str | bytes]) -> ByteTable:
    bytes_of = BytesByToken()
    text_of = {}
    for number, piece in pieces.items():
        data = bytes_of[number] = piece if isinstance(piece, bytes) else piece.encode()
        try:
            text_of[number] = data.decode()
        except UnicodeDecodeError:
            continue
    return ByteTable(bytes_of, text_of)


def _window(tokenizer: Tokenizer, known: frozenset[int]) -> Callable[[], Decoder]:
    # `known` has no special tokens if these are to be skipped, so the library need not skip them again.
    def decode(tokens: list[int]) -> str:
        try:
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        except BaseException as error:
            # A panic in the library's Rust code is a BaseException in Python.
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            raise TextError(f"the tokenizer raised {type(error).__name__}") from error

    return lambda: WindowDecoder(decode, known)
