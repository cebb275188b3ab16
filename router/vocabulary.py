"""The own bytes of each token of a byte-level vocabulary, for log-probabilities."""

import json

from tokenizers import Tokenizer


class TokenBytes:
    """Token id → its bytes; empty bytes for every id where the vocabulary is not byte-level, or the id has no token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.get_added_tokens_decoder())
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None

    def __getitem__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or self._alphabet is None:
            return b""
        try:
            if token_id not in self._special:
                return bytes(self._alphabet[character] for character in token)
        except KeyError:
            pass  # a token outside the byte alphabet stands for itself, as an added one does
        return str(token).encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    return bool(json.loads(tokenizer.decoder.__getstate__())["type"] == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 is itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
