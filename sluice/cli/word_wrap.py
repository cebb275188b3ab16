"""Wraps a stream of text between words."""

import re
from collections.abc import Callable

from rich.cells import cell_len

WIDE = r"\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uff60"
"""Characters of scripts without spaces, between which a line may end."""
PIECES = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")
COMPLETE = re.compile(rf"\s+|[{WIDE}]")
"""Pieces that further text does not change."""
FENCE = "```"
"""Begins and ends a block of code, whose lines are not wrapped."""
TAB = " " * 8


class WordWrapper:
    """Passes a stream of text on, with line breaks so that no word crosses column `width`.

    A word is held back until its end is known. A word wider than a line is passed on as it is.
    """

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._held = ""
        """The text's last word, which may continue."""
        self._space = ""
        """White space after the line's last word, written before the next one on the same line."""
        self._is_open = False
        """Whether a part of a word wider than a line was written, so that the next one belongs to it."""
        self._is_code = False

    def write(self, text: str) -> None:
        pieces = PIECES.findall(self._held + text)
        self._held = pieces.pop() if pieces and not COMPLETE.fullmatch(pieces[-1]) else ""
        for piece in pieces:
            self._pass_on(piece)
        if self._is_open or cell_len(self._held) > self._width:
            self._pass_on(self._held)
            self._held, self._is_open = "", True

    def _pass_on(self, piece: str) -> None:
        is_continuation, self._is_open = self._is_open, False
        if piece == "\n":
            self._write("\n")
            self._column, self._space = 0, ""
        elif piece.isspace():
            self._space += piece
        elif piece:
            self._write_word(piece, may_wrap=not is_continuation)

    def _write_word(self, word: str, *, may_wrap: bool) -> None:
        if not self._column and word.startswith(FENCE):
            self._is_code = not self._is_code
        column = self._column + cell_len(self._space.replace("\t", TAB) + word)
        if self._column and column > self._width and may_wrap and not self._is_code:
            self._write("\n" + word)
            self._column = cell_len(word)
        else:
            self._write(self._space + word)
            self._column = column
        self._space = ""
