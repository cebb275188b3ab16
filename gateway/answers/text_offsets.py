"""Where each token of a completion begins in the completion's text."""

from codecs import getincrementaldecoder, utf_8_decode
from collections import deque
from typing import NamedTuple

NewDecoder = getincrementaldecoder("utf-8")
REPLACEMENT = "\ufffd"
"""In the text for bytes that are no character."""


class Shown(NamedTuple):
    """Characters that are expected in the text."""

    text: str
    split: bool = False
    """Whether an earlier token has the first bytes. SentencePiece may then show a REPLACEMENT for each byte instead."""


class TextOffsets:
    """Finds the tokens of one choice in its text, token by token, while both arrive.

    The joined tokens are more than the text: special tokens are omitted, some tokenizers strip the first space, and a
    character whose bytes are split over tokens is in the text only when it is complete. In a stream, text may be held
    back, for example because it may be the beginning of a stop string; until it arrives, its tokens count as shown.

    Some tokenizers show each byte of an invalid run as a character of its own. Of tokens in such a run, offsets may be
    too small; after it they are right, unless it is followed by a token that is this character itself.
    """

    def __init__(self) -> None:
        self._decoder = NewDecoder("replace")
        self._text = ""
        self._position = 0
        """Position in `_text` up to which the tokens are found."""
        self._trimmed = 0
        """Number of characters before `_text`."""
        self._waiting: deque[Shown] = deque()
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
        if omitted:
            return self._end()
        begun, _ = self._decoder.getstate()
        if begun and not _continues(begun, token):
            self._expect(Shown(self._decoder.decode(b"", final=True), split=True))
            begun = b""
        shown = Shown(self._decoder.decode(token), split=bool(begun))
        if not self._waiting:
            self._align(shown)
        offset = self._end()
        self._expect(shown)
        return offset

    def _end(self) -> int:
        """The offset after all tokens so far."""
        return self._trimmed + self._position + self._waiting_length

    def _expect(self, shown: Shown) -> None:
        if shown.text:
            self._waiting.append(shown)
            self._waiting_length += len(shown.text)
            self._find()

    def _find(self) -> None:
        while self._waiting:
            shown = self._waiting[0]
            self._align(shown)
            length = self._length_in_text(shown)
            if length is None:
                break
            self._position += length
            self._waiting_length -= len(self._waiting.popleft().text)

    def _length_in_text(self, shown: Shown) -> int | None:
        """0 if the token has no text, although it is not special: it ends the output. None if it has not arrived."""
        for form in self._forms(shown.text):
            there = self._text[self._position : self._position + len(form)]
            if form == there:
                return len(form)
            if form.startswith(there):
                return None
        return 0

    def _align(self, shown: Shown) -> None:
        """Move the position to where this text begins if the text of the tokens before it was not what it seemed."""
        text, position = self._text, self._position
        if not shown.text or text.startswith(shown.text, position):
            return
        only_blanks = self._trimmed == 0 and text[:position].isspace()
        if only_blanks and text.startswith(shown.text, position - 1):
            # The first blank was stripped, and the next one taken for it.
            self._position -= 1
        elif not shown.split and not any(form[:1] in ("", REPLACEMENT) for form in self._forms(shown.text)):
            # Invalid bytes of tokens before this one: it is unknown how many characters they are.
            while self._text.startswith(REPLACEMENT, self._position):
                self._position += 1

    def _forms(self, text: str) -> tuple[str, ...]:
        """How the text of a token may be shown. At the start of a text, tokenizers strip one blank or all of the token,
        or keep WordPiece's mark."""
        if not self._text or self._trimmed + self._position > 0:
            return (text,)
        return text, text.removeprefix(" "), text.replace(" ", ""), f"##{text}"


def _continues(begun: bytes, token: bytes) -> bool:
    """Whether a token continues a character of which it has not the first bytes."""
    try:
        utf_8_decode(begun + token[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True
