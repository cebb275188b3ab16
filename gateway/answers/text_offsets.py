"""Where each token of a completion begins in the completion's text."""

from codecs import getincrementaldecoder
from collections import deque

NewDecoder = getincrementaldecoder("utf-8")


class TextOffsets:
    """Finds the tokens of one choice in its text, token by token, while both arrive.

    The joined tokens are more than the text: special tokens are omitted, some tokenizers strip the first space, and a
    character whose bytes are split over tokens is in the text only when it is complete. In a stream, text may be held
    back, for example because it may be the beginning of a stop string; until it arrives, its tokens count as shown.
    """

    def __init__(self) -> None:
        self._decoder = NewDecoder("replace")
        self._text = ""
        self._position = 0
        """Position in `_text` up to which the tokens are found."""
        self._trimmed = 0
        """Number of characters before `_text`."""
        self._waiting: deque[str] = deque()
        """The characters of tokens that are not found yet."""
        self._waiting_length = 0

    def add_text(self, text: str) -> None:
        self._trimmed += self._position
        self._text, self._position = self._text[self._position :] + text, 0
        self._find()

    def place(self, token: bytes, *, omitted: bool = False) -> int:
        """The offset of the next token: of its first character, even if that began in the token before it.

        `omitted`: the token is known to have no text.
        """
        offset = self._trimmed + self._position + self._waiting_length
        if omitted:
            return offset
        if shown := self._decoder.decode(token):
            self._waiting.append(shown)
            self._waiting_length += len(shown)
            self._find()
        return offset

    def _find(self) -> None:
        text, position = self._text, self._position
        while self._waiting:
            shown = self._waiting[0]
            if self._trimmed + position == 0 and not text.startswith(" "):
                shown = shown.removeprefix(" ")
            if text.startswith(shown, position):
                position += len(shown)
            elif shown.startswith(text[position : position + len(shown)]):
                break  # Its text has not arrived.
            # Otherwise the token has no text, although it is not special: it ends the output.
            self._waiting_length -= len(self._waiting.popleft())
        self._position = position
