"""`sluice chat`: an interactive conversation with the model."""

import re
import sys
from functools import partial
from typing import Annotated

import typer

from sluice.cli.common import (
    LoraId,
    MaxTokens,
    PromptAdapterId,
    Seed,
    Server,
    Temperature,
    describe,
    fail,
    notes,
    print_error,
    with_server,
)
from sluice.cli.stream_printer import print_stream
from sluice.client import Client, Options, SluiceError, Unavailable

HELP, CLEAR, EXIT, QUIT = "/help", "/clear", "/exit", "/quit"
COMMANDS = {HELP: "show this help", CLEAR: "start a new conversation", EXIT: f"quit ({QUIT} and Ctrl-D also quit)"}
COMMAND = re.compile(r"(/\w+)(?:\s|$)")
"""A line that begins with this is a command. A path like /etc/passwd is a message."""


@with_server
def chat(
    server: Server,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    lora: LoraId = None,
    prompt_adapter: PromptAdapterId = None,
) -> None:
    """Chat with the model interactively.

    /help lists the commands of a chat. Ctrl-C stops an answer, Ctrl-D quits.
    """
    options = Options(max_tokens=max_tokens, temperature=temperature, seed=seed)
    options |= Options(lora_id=lora, prompt_adapter_id=prompt_adapter)
    with server.client() as client:
        check_chat(client)
        Conversation(client, system, options).run()


def check_chat(client: Client) -> None:
    """Raises typer.Exit if no model has a chat template."""
    models = client.models()
    if not any("chat" in model.capabilities for model in models):
        names = ", ".join(model.name for model in models) or "no model"
        raise fail(f"{names} has no chat template; use sluice generate to complete a prompt instead")


class Conversation:
    """Reads user messages and commands from stdin and prints the answers."""

    def __init__(self, client: Client, system: str | None, options: Options) -> None:
        self._client = client
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)

    def run(self) -> None:
        if sys.stdin.isatty():
            # Importing it gives `input` arrow keys and a history.
            import readline  # noqa: F401

            notes().print(f"{HELP} lists the commands, Ctrl-D quits", style="dim")
        while (text := self._read()) is not None:
            line = text.rstrip()
            if line in (EXIT, QUIT):
                return
            if command := COMMAND.match(line):
                self._run_command(line, command[1])
            elif line:
                self._answer(text)

    def _run_command(self, line: str, command: str) -> None:
        """Run the command of a line, or say what is wrong with it."""
        if line == CLEAR:
            self._messages = list(self._system)
            notes().print("new conversation", style="dim")
        elif line == HELP:
            for name, meaning in COMMANDS.items():
                notes().print(f"{name}  {meaning}", style="dim")
            notes().print("Begin a message that starts with such a word with a space.", style="dim")
        elif command in (*COMMANDS, QUIT):
            print_error(f"{command} must be alone on its line (got {line})")
        else:
            print_error(f"unknown command {command}; {HELP} lists the commands. To send it, begin with a space")

    def _read(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _answer(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            (answer,) = print_stream(partial(self._client.stream, messages, **self._options))
        except KeyboardInterrupt:
            notes().print("\nstopped; this turn is not part of the conversation", style="dim")
            return
        except Unavailable:
            # Other errors end one turn. Without a server the conversation cannot go on.
            raise
        except SluiceError as error:
            print_error(describe(error, " or ".join(self._client.addresses)))
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]
