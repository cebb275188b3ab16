"""`sluice chat` on a terminal: pasted texts, Ctrl-C, lines of 80 columns."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.fakes.processes import wait_until

pytestmark = pytest.mark.process

CTRL_C = "\x03"
CODES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A chat in a process with a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "sluice", "chat", "--address", address]
        # Without COLUMNS, the width of the new terminal is unknown.
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=lambda: os.login_tty(slave)
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Everything shown since the last wait, up to `text`."""
        assert wait_until(lambda: text in self._read(), 30), self._shown
        before, _, self._shown = self._shown.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> str:
        # OSError: nothing to read yet, or the process has ended.
        with suppress(OSError):
            self._shown += CODES.sub("", os.read(self._master, 65536).decode()).replace("\r\n", "\n")
        return self._shown


@pytest.fixture
def terminal(address) -> Iterator[Terminal]:
    shown = Terminal(address)
    yield shown
    shown.close()


def contents(script) -> list[list[str]]:
    return [[m.content for m in each.spec.chat.messages] for each in script.seen if hasattr(each, "spec")]


def test_a_conversation_on_a_terminal(terminal, script) -> None:
    words = "word " * 40
    script.texts = [words]
    terminal.wait_for("> ")
    terminal.type("a pasted\ntext of\nthree lines\n")
    terminal.wait_for("word")
    answer = "word" + terminal.wait_for("3 prompt tokens")
    assert max(map(len, answer.splitlines())) == 79
    terminal.wait_for("> ")

    script.texts, script.hangs = ["half an "], True
    terminal.type("one\n")
    terminal.wait_for("half")
    terminal.type(CTRL_C)
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    assert script.gone.wait(10)

    script.hangs = False
    terminal.type("half a line" + CTRL_C)
    terminal.wait_for("press Ctrl-C twice")
    terminal.wait_for("> ")
    terminal.type("\x1b[200~two\nlines\x1b[201~\n")
    terminal.wait_for("tokens/s")
    pasted = "a pasted\ntext of\nthree lines"
    assert contents(script)[-1] == [pasted, words, "one", "half an ", "two\nlines"]

    terminal.wait_for("> ")
    terminal.type(CTRL_C)
    terminal.wait_for("press Ctrl-C twice")
    terminal.wait_for("> ")
    terminal.type(CTRL_C)
    assert wait_until(lambda: terminal.process.poll() is not None, 10)
    assert terminal.process.returncode == 0
