"""Reads a user's messages: lines of stdin, with editing and pasted texts of several lines on a terminal."""

import select
import sys

PROMPT = "> "
PASTE_SECONDS = 0.05
"""How soon the next line of a pasted text is available after the one before."""


class MessageReader:
    """Reads a message per line, and a pasted text of several lines as one message."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            _edit_lines()

    def read(self) -> str | None:
        """The next message; None at the end of stdin. Raises KeyboardInterrupt."""
        try:
            lines = [input(PROMPT if self.is_terminal else "")]
        except EOFError:
            if self.is_terminal:
                print()
            return None
        while self.is_terminal and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            # The rest of a text that was pasted into a terminal without bracketed paste. Its last line may lack a line
            # break, and is then edited like any other.
            try:
                lines.append(input())
            except EOFError:
                break
        return "\n".join(lines)


def _edit_lines() -> None:
    """Give `input` arrow keys and a history, and make it insert the line breaks of a pasted text."""
    import readline

    # Python turns it off by default. libedit does not have it.
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
