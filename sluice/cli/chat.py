"""`sluice chat`: a conversation with the model, its commands, and the options that `/set` changes."""

import re
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, cast

import typer

from sluice.cli.common import OPTIONS, Server, describe, fail, notes, print_error, with_server
from sluice.cli.sampling import with_sampling
from sluice.cli.stream_printer import print_stream, write_to_stdout
from sluice.cli.word_wrap import WordWrapper
from sluice.client import Client, Options, SluiceError, Stream, Unavailable
from sluice.v1.admin_pb2 import Model
from sluice.v1.sampling_pb2 import SamplingParams

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
DEFAULT = "default"
"""Removes the setting when given in place of a value."""
KINDS: Mapping[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "stop": str,
}
"""The options that `/set` changes, and the type of each value."""
NAMES_OF_TYPES = {int: "an integer", float: "a number"}
NAMES_OF_FIELDS = OPTIONS | {f"spec.{part}.{name}": name for part in ("sampling", "stopping") for name in KINDS}
"""Names of API fields in errors: those that `/set` can change have the names of its settings."""
PROMPT = "> "
PASTE_SECONDS = 0.05
"""How soon the next line of a pasted text is available after the one before."""


@with_server
@with_sampling
def chat(
    server: Server,
    options: Options,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
) -> None:
    """Chat with the model.

    /help lists the commands of a chat, such as /set and /system. Ctrl-C stops an answer, Ctrl-D quits. Without a
    terminal, each line of stdin is a message: echo 'Why is the sky blue?' | sluice chat
    """
    with server.client() as client:
        ChatSession(client, chat_model(client), system, options).run()


def chat_model(client: Client) -> Model:
    """The model with a chat template. Raises typer.Exit if there is none."""
    models = client.models()
    for model in models:
        if "chat" in model.capabilities:
            return model
    names = ", ".join(model.name for model in models) or "no model"
    raise fail(f"{names} has no chat template; use sluice generate to complete a prompt instead")


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


def read_setting(words: str) -> tuple[str, Any]:
    """An option and its value, from "NAME VALUE"; None for "default". Raises ValueError for a wrong name or value."""
    name, _, value = words.strip().partition(" ")
    if name not in KINDS:
        raise ValueError(f"unknown setting {name}; the settings are {', '.join(KINDS)}")
    return name, _read_value(name, value.strip())


def describe_setting(name: str, options: Mapping[str, Any], defaults: SamplingParams) -> str:
    """A setting and its value, or the server's default."""
    if (value := options.get(name)) is not None:
        return f"{name} {' '.join(map(repr, value)) if isinstance(value, list) else value}"
    of_server = {field.name: f"{number:.7g} ({DEFAULT})" for field, number in defaults.ListFields()}
    return f"{name} {of_server.get(name, DEFAULT)}"


def _read_value(name: str, text: str) -> Any:
    if text == DEFAULT:
        return None
    kind = KINDS[name]
    if not text:
        raise ValueError(f"{name} needs a value, or {DEFAULT}")
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name} must be {NAMES_OF_TYPES[kind]} or {DEFAULT} (got {text})") from None
    return [value] if kind is str else value


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


@contextmanager
def ctrl_c_cancels(stream: Stream) -> Iterator[threading.Event]:
    """Until the end of the `with` block, Ctrl-C cancels the stream and sets the event that this yields."""
    cancelled = threading.Event()

    def on_interrupt(*_: object) -> None:
        cancelled.set()
        # In a thread, since a handler may interrupt the holder of one of gRPC's locks.
        threading.Thread(target=stream.cancel, daemon=True).start()

    former = signal.getsignal(signal.SIGINT)
    # Under nohup, or in the background of a shell, it is ignored and must stay so.
    if former is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, former)
