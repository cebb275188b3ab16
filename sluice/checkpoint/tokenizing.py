"""Calls of the tokenizers library that release the GIL, as only its methods for batches do (version 0.23).

`Tokenizer.encode` and `decode` keep it for 0.4 s per megabyte of text, in which no other thread of the process runs.
"""

from collections.abc import Sequence

from tokenizers import Encoding, Tokenizer


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, offsets: bool = False) -> Encoding:
    """The encoding of a text. Without `offsets`, which double the time, its offsets are 0."""
    encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    return encode_batch([text], add_special_tokens=add_special_tokens)[0]


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids. Invalid UTF-8 becomes U+FFFD."""
    return str(tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
