"""Words that are given as token ids, as text."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from sluice.trtllm.errors import UnsupportedOptionError

UNDECODABLE = "\ufffd"


class Words:
    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def text(self, option: str, ids: Sequence[int]) -> str:
        """Raises UnsupportedOptionError unless these tokens are how the tokenizer writes their text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if UNDECODABLE in text or self._tokenizer.encode(text, add_special_tokens=False).ids != list(ids):
            raise UnsupportedOptionError(
                f"{option} {list(ids)}", "several tokens are matched as text, and these are not its usual tokens"
            )
        return text
