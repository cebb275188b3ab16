"""The conversation of `sluice chat`: its messages, options and commands."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from typing import cast

from sluice.cli.chat_settings import KINDS, describe_setting, read_setting
from sluice.cli.common import describe, notes, print_error
from sluice.cli.field_options import OPTIONS
from sluice.cli.interrupt import ctrl_c_cancels
from sluice.cli.message_reader import MessageReader
from sluice.cli.stream_printer import print_stream, write_to_stdout
from sluice.cli.word_wrap import WordWrapper
from sluice.client import Client, Options, SluiceError, Unavailable
from sluice.v1.admin_pb2 import Model

AGAIN_SECONDS = 3.0
"""Two Ctrl-C within this time quit. A single one only discards the line, which readline has by then forgotten."""
COMMANDS = {
    "/set [NAME VALUE]": "change an option of the next answers, such as temperature, or show all; VALUE may be default",
    "/system [TEXT]": "replace the system prompt, or remove it",
    "/clear": "start a new conversation",
    "/help": "show this help",
    "/exit": "quit, as do /quit and Ctrl-D",
}
"""What each command does."""
COMMAND = re.compile(r"(/\w+)(?:\s|$)")
"""A line that begins with this is a command. A path like /etc/passwd is a message."""
NAMES_OF_FIELDS = OPTIONS | {f"spec.{part}.{name}": name for part in ("sampling", "stopping") for name in KINDS}
"""Names of API fields in errors: those that `/set` can change have the names of its settings."""


class ChatSession:
    """Reads user messages and commands from stdin and prints the answers."""

    def __init__(self, client: Client, model: Model, system: str | None, options: Options) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._system = system or ""
        self._turns: list[Mapping[str, str]] = []
        self._reader = MessageReader()
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._set_system,
            "/clear": self._clear,
            "/help": self._help,
        }

    def run(self) -> None:
        """Answer messages until the end of stdin, a command to quit, or Ctrl-C twice within AGAIN_SECONDS."""
        if self._reader.is_terminal:
            _note("/help lists the commands, Ctrl-D quits")
        interrupted_at = -AGAIN_SECONDS
        while True:
            try:
                if (text := self._reader.read()) is None or text.rstrip() in ("/exit", "/quit"):
                    return
                interrupted_at = -AGAIN_SECONDS
                self._on_message(text)
            except KeyboardInterrupt:
                print()
                now = time.monotonic()
                if not self._reader.is_terminal or now < interrupted_at + AGAIN_SECONDS:
                    return
                interrupted_at = now
                _note("press Ctrl-C twice or Ctrl-D to quit")

    def _on_message(self, text: str) -> None:
        if command := COMMAND.match(text):
            self._run_command(command[1], text[command.end() :].strip())
        elif text.strip():
            self._answer(text)

    def _run_command(self, command: str, argument: str) -> None:
        """Run a command, or say what is wrong with it."""
        takes_argument = command in ("/set", "/system")
        if command not in (*self._commands, "/exit", "/quit"):
            print_error(f"unknown command {command}; /help lists the commands. To send it, begin with a space")
        elif argument and not takes_argument:
            print_error(f"{command} must be alone on its line (got {command} {argument})")
        else:
            self._commands[command](argument)

    def _set(self, words: str) -> None:
        if not words:
            defaults = self._model.default_sampling
            _note("\n".join(describe_setting(name, self._options, defaults) for name in KINDS))
            return
        try:
            name, value = read_setting(words)
        except ValueError as error:
            print_error(str(error))
            return
        self._options = cast(Options, {**self._options, name: value})
        _note(describe_setting(name, self._options, self._model.default_sampling))

    def _set_system(self, text: str) -> None:
        self._system = text
        _note("system prompt replaced" if text else "no system prompt")

    def _clear(self, _: str) -> None:
        self._turns = []
        _note("new conversation")

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        _note("\n".join(f"{command:{width}}  {meaning}" for command, meaning in COMMANDS.items()))
        _note("Ctrl-C stops an answer. Begin a message that starts with such a word with a space.")
        _note("From a script: echo 'Why is the sky blue?' | sluice chat")

    def _answer(self, text: str) -> None:
        turn = [*self._turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            stream = self._client.stream([*system, *turn], **self._options)
            with ctrl_c_cancels(stream) as stopped:
                (answer,) = print_stream(lambda: stream, write=self._writer())
        except SluiceError as error:
            # Other errors end one turn. A program that reads from a pipe must learn that there is no server any more.
            if isinstance(error, Unavailable) and not self._reader.is_terminal:
                raise
            print_error(describe(error, " or ".join(self._client.addresses), NAMES_OF_FIELDS))
            return
        if answer or not stopped.is_set():
            self._turns = [*turn, {"role": "assistant", "content": answer}]
        if stopped.is_set():
            _note("stopped" if answer else "stopped before an answer; this turn is not part of the conversation")

    def _writer(self) -> Callable[[str], None]:
        if not self._reader.is_terminal:
            return write_to_stdout
        # Without a known width, 80 columns.
        return WordWrapper(write_to_stdout, shutil.get_terminal_size((80, 24)).columns).write


def _note(text: str) -> None:
    notes().print(text, style="dim", markup=False)
