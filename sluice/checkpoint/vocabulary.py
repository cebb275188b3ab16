"""A tokenizer.json: encoding and decoding of texts, and its tokens as bytes or text."""

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer

Piece = str | bytes
"""Text, or bytes that may be part of a character."""
Family = Literal["bytes", "pieces", "window"]
Read = Callable[[str], Piece]
"""Converts a token as written in tokenizer.json to its piece."""

REPLACEMENT = "\ufffd"
UNMAPPED = "\uffff"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>", re.ASCII)
"""A token of SentencePiece's byte fallback, as the tokenizers library parses it."""


# The tokenizers library releases the GIL only in its methods for batches (version 0.23). `Tokenizer.encode` and
# `Tokenizer.decode` hold it for 0.4 s per megabyte of text, during which no other thread of the process runs.
def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, offsets: bool = False) -> Encoding:
    """The encoding of a text. Without `offsets`, which double the time, its offsets are 0."""
    encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    return encode_batch([text], add_special_tokens=add_special_tokens)[0]


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids. Invalid UTF-8 becomes U+FFFD."""
    return str(tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])


@dataclass(frozen=True, slots=True)
class Reading:
    """How a tokenizer's decoder converts tokens.

    bytes: each token is a sequence of bytes, and the text is their concatenation (GPT-2, Qwen, Llama 3).
    pieces: each token is a text, or a single byte of a run, then of type `bytes` (Llama 2, Mistral, T5, BERT).
    window: the text of a token depends on its neighbours.
    """

    family: Family
    piece: Read | None = None
    """Converts a token inside a text. None for `window`."""
    first: Read | None = None
    """Converts a token at the start of a text. None if that makes no difference."""
    strip: str = ""
    """Character that is removed from the start of the text."""
    strip_count: int = 0
    """Maximum number of these characters to remove."""


class Vocabulary:
    """The tokens of a tokenizer by id, including special and added tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reading = _reading(tokenizer)
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {token.content: token_id for token_id, token in added if token.special}

    @property
    def tokens(self) -> dict[int, str]:
        """Tokens by id as written in tokenizer.json, which is the form that the library's decoder expects."""
        ids = self.tokenizer.get_vocab(with_added_tokens=True).values()
        tokens = {token_id: self.tokenizer.id_to_token(token_id) for token_id in ids}
        return {token_id: token for token_id, token in tokens.items() if token is not None}

    @property
    def special(self) -> frozenset[str]:
        """Tokens that `skip_special_tokens` omits."""
        return frozenset(self._special)

    def omitted_ids(self, skip_special_tokens: bool, keep: Collection[str]) -> frozenset[int]:
        """Ids of the special tokens that a text omits. `keep`: special tokens that are not skipped."""
        if not skip_special_tokens:
            return frozenset()
        return frozenset(token_id for text, token_id in self._special.items() if text not in keep)

    def prompt_text(self, prompt: Sequence[int], skip_special_tokens: bool, keep: Collection[str] = ()) -> str:
        """The text of a prompt. If it ends within a character, that character belongs to the text of the output.

        `keep`: special tokens that are not skipped.
        """
        if skip_special_tokens and keep:
            prompt, skip_special_tokens = self._without(self.special.difference(keep), prompt), False
        text = self._decode(prompt, skip_special_tokens)
        if self.reading.family == "window" or not text.endswith(REPLACEMENT):
            return text
        ids = self._without(self.special if skip_special_tokens else (), prompt)
        unfinished = self._unfinished_bytes(ids)
        if self.reading.family == "bytes":
            return text[:-1] if unfinished else text
        return self._decode(ids[: len(ids) - unfinished], False)

    def _without(self, omitted: Collection[str], ids: Sequence[int]) -> list[int]:
        """The ids that have a token, but none of these tokens."""
        tokens = [(number, self.tokenizer.id_to_token(number)) for number in ids]
        return [number for number, token in tokens if token is not None and token not in omitted]

    def _unfinished_bytes(self, ids: Sequence[int]) -> int:
        """Number of bytes of an incomplete character at the end. 0 if SentencePiece's run of bytes there is invalid."""
        errors = "replace" if self.reading.family == "bytes" else "strict"
        pieces: list[bytes] = []
        for number in reversed(ids):
            piece = self._piece(number)
            if not isinstance(piece, bytes):
                break
            pieces.append(piece)
        run = b"".join(reversed(pieces))
        try:
            return len(run) - utf_8_decode(run, errors, False)[1]
        except UnicodeDecodeError:
            return 0

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return decode(self.tokenizer, ids, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The text of a token in UTF-8. Empty for ids without a token, and for the family `window`."""
        piece = self._piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def _piece(self, token_id: int) -> Piece:
        token = self.tokenizer.id_to_token(token_id)
        return "" if token is None or self.reading.piece is None else self.reading.piece(token)


def _reading(tokenizer: Tokenizer) -> Reading:
    stages = _stages(tokenizer)
    names = [stage["type"] for stage in stages]
    if names == ["ByteLevel"]:
        return Reading("bytes", _byte_level)
    if names == ["Metaspace"]:
        return _metaspace(stages[0])
    if names == ["WordPiece"]:
        # Use the library, whose rule depends only on the token and on whether it is the first one.
        decode = tokenizer.decoder.decode
        return Reading("pieces", lambda token: str(decode(["", token])), lambda token: str(decode([token])))
    if _is_sentencepiece(stages):
        return _sentencepiece(stages)
    return Reading("window")


def _stages(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder stages of tokenizer.json, with sequences flattened. Empty without a decoder."""

    def flatten(stage: dict[str, Any]) -> list[dict[str, Any]]:
        if stage["type"] != "Sequence":
            return [stage]
        return [part for inner in stage["decoders"] for part in flatten(inner)]

    return [] if tokenizer.decoder is None else flatten(json.loads(tokenizer.decoder.__getstate__()))


def _to_latin() -> dict[int, str]:
    """Maps GPT-2's character for each byte to that byte's Latin-1 character, other Latin-1 characters to UNMAPPED."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, UNMAPPED) | {0x100 + i: chr(byte) for i, byte in enumerate(others)}


TO_LATIN = _to_latin()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        # An added token, whose characters are text and do not represent bytes.
        return token.encode()


def _metaspace(stage: dict[str, Any]) -> Reading:
    def replace(by: str, token: str) -> str:
        return token.replace(stage["replacement"], by)

    first = None if stage["prepend_scheme"] == "never" else partial(replace, "")
    return Reading("pieces", partial(replace, " "), first)


def _is_sentencepiece(stages: list[dict[str, Any]]) -> bool:
    """Any number of Replace, ByteFallback, then optionally Fuse, then optionally Strip from the left."""
    names = " ".join(stage["type"] for stage in stages)
    if not re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", names):
        return False
    for stage in stages:
        if stage["type"] == "Replace" and not stage["pattern"].get("String"):
            return False
        if stage["type"] == "Strip" and stage["stop"] != 0:
            return False
    return True


def _sentencepiece(stages: list[dict[str, Any]]) -> Reading:
    replacements = [(stage["pattern"]["String"], stage["content"]) for stage in stages if stage["type"] == "Replace"]

    def read(token: str) -> Piece:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token

    last = stages[-1]
    if last["type"] == "Strip":
        return Reading("pieces", read, strip=last["content"], strip_count=last["start"])
    return Reading("pieces", read)
