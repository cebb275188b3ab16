"""The text of stop words and bad words, which TensorRT-LLM's requests give as token ids."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from sluice.trtllm.errors import UnsupportedOptionError

UNDECODABLE = "\ufffd"


class Words:
    """Decodes words with the checkpoint's tokenizer."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def text(self, option: str, ids: Sequence[int]) -> str:
        """The text of a word. Raises UnsupportedOptionError unless the tokenizer encodes that text as these tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if UNDECODABLE in text or self._tokenizer.encode(text, add_special_tokens=False).ids != list(ids):
            raise UnsupportedOptionError(
                f"{option} {list(ids)}",
                "words of several tokens are matched as text, which the tokenizer does not encode as these tokens",
            )
        return text
