"""Loads tokenizer.json and decides how its tokens become text: the tables of the decoders in decoder.py."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

UNMAPPED = "\uffff"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)


class TokenizerError(ValueError):
    """The file is no usable tokenizer.json."""


@dataclass(frozen=True, slots=True)
class Decoders:
    """Makes a fresh decoder for each sequence."""

    kind: str
    """"bytes", "pieces" or "window"."""
    all_tokens: Callable[[], Decoder]
    without_special: Callable[[], Decoder]

    def new(self, skip_special_tokens: bool) -> Decoder:
        """A decoder at the start of a sequence."""
        return self.without_special() if skip_special_tokens else self.all_tokens()


def load_decoders(file: Path) -> Decoders:
    """Read a tokenizer.json. Raises TokenizerError."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} is no tokenizer.json: {error}") from error
    return decoders_of(tokenizer)


def decoders_of(tokenizer: Tokenizer) -> Decoders:
    """Choose by the tokenizer's decoder: byte table, piece table, or else the library itself over a window."""
    tokens = _tokens(tokenizer)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    plain = {number: token for number, token in tokens.items() if token not in special}
    stages = _stages(tokenizer)
    kind, build = _choose(tokenizer, stages)
    return Decoders(kind, build(tokens), build(plain))


def _choose(
    tokenizer: Tokenizer, stages: list[dict[str, Any]]
) -> tuple[str, Callable[[dict[int, str]], Callable[[], Decoder]]]:
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return "bytes", _byte_level
    if [stage["type"] for stage in stages] == ["Metaspace"]:
        return "pieces", lambda tokens: _metaspace(tokens, stages[0])
    if _is_sentencepiece(stages):
        return "pieces", lambda tokens: _sentencepiece(tokens, stages)
    return "window", lambda tokens: _window(tokenizer, frozenset(tokens))


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The vocabulary by id, as the library's decode sees it."""
    found = {number: tokenizer.id_to_token(number) for number in tokenizer.get_vocab(with_added_tokens=True).values()}
    return {number: token for number, token in found.items() if token is not None}


def _stages(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder as tokenizer.json has it, a sequence spread out; empty where there is none."""
    if tokenizer.decoder is None:
        return []
    found = json.loads(tokenizer.decoder.__getstate__())
    return list(found["decoders"]) if found["type"] == "Sequence" else [found]


def _byte_level(tokens: dict[int, str]) -> Callable[[], Decoder]:
    """A token whose every character stands for a byte is those bytes, any other one is its own UTF-8."""
    to_latin = _byte_alphabet()
    bytes_of = BytesByToken()
    text_of = {}
    for number, token in tokens.items():
        try:
            data = token.translate(to_latin).encode("latin-1")
        except UnicodeEncodeError:
            data = token.encode()
        bytes_of[number] = data
        try:
            text_of[number] = data.decode()
        except UnicodeDecodeError:
            continue
    table = ByteTable(bytes_of, text_of)
    return lambda: ByteDecoder(table)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's characters for bytes, each to the Latin-1 character of its byte; the rest of Latin-1 to what is none."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return dict.fromkeys(others, UNMAPPED) | {0x100 + i: chr(byte) for i, byte in enumerate(others)}


def _metaspace(tokens: dict[int, str], stage: dict[str, Any]) -> Callable[[], Decoder]:
    mark = stage["replacement"]
    pieces: dict[int, str | bytes] = {number: token.replace(mark, " ") for number, token in tokens.items()}
    first: dict[int, str | bytes] | None = None
    if stage["prepend_scheme"] != "never":
        first = {number: token.replace(mark, "") for number, token in tokens.items()}
    table = PieceTable(pieces, first)
    return lambda: PieceDecoder(table)


def _is_sentencepiece(stages: list[dict[str, Any]]) -> bool:
    """Replace…, ByteFallback, then perhaps Fuse, then perhaps Strip from the left: each stage as the tables mean it."""
    names = " ".join(stage["type"] for stage in stages)
    if not re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", names):
        return False
    for stage in stages:
        if stage["type"] == "Replace" and not stage["pattern"].get("String"):
            return False
        if stage["type"] == "Strip" and stage["stop"] != 0:
            return False
    return True


def _sentencepiece(tokens: dict[int, str], stages: list[dict[str, Any]]) -> Callable[[], Decoder]:
    replacements = [(stage["pattern"]["String"], stage["content"]) for stage in stages if stage["type"] == "Replace"]
    pieces: dict[int, str | bytes] = {}
    for number, token in tokens.items():
        text = token
        for pattern, content in replacements:
            text = text.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(text)
        pieces[number] = bytes([int(byte[1], 16)]) if byte else text
    table = PieceTable(pieces)
    if stages[-1]["type"] == "Strip":
        table = PieceTable(pieces, strip=stages[-1]["content"], strip_count=stages[-1]["start"])
    return lambda: PieceDecoder(table)


def _window(tokenizer: Tokenizer, known: frozenset[int]) -> Callable[[], Decoder]:
    # A decoder built for one vocabulary drops the special tokens itself, so the library must not look again.
    def decode(tokens: list[int]) -> str:
        try:
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        except BaseException as error:
            # A panic in the library's Rust is no Exception in Python.
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            raise TextError(f"the tokenizer raised {type(error).__name__}") from error

    return lambda: WindowDecoder(decode, known)
