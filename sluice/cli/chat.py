"""`sluice chat`: a conversation with the model."""

import sys
from typing import Annotated

import typer

from sluice.cli.common import (
    MaxTokens,
    Seed,
    Temperature,
    complain,
    describe,
    notes,
)
from sluice.cli.generate import print_stream
from sluice.cli.server import Server, asks_server
from sluice.client import Client, Options, SluiceError, Unavailable

RESET = "/reset"


@asks_server
def chat(
    server: Server,
    system: Annotated[str | None, typer.Option(help="Instructions that come first")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Talk with the model. /reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves."""
    options = Options(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with server.client() as client:
        client.health()
        Conversation(client, system, options).run()


class Conversation:
    """The messages so far."""

    def __init__(self, client: Client, system: str | None, options: Options) -> None:
        self._client = client
        self._options = options
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)

    def run(self) -> None:
        """Read, answer, until the end of the input."""
        if sys.stdin.isatty():
            # Arrow keys and a history of lines, for `input`.
            import readline  # noqa: F401

            notes().print(f"{RESET} starts anew, Ctrl-D leaves", style="dim")
        while (text := self._read()) is not None:
            if text.strip() == RESET:
                self._messages = list(self._first)
                notes().print("the conversation is forgotten", style="dim")
            elif text.strip():
                self._answer(text)

    def _read(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _answer(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        stream = self._client.stream(messages, **self._options)
        try:
            answer = print_stream(stream)
        except KeyboardInterrupt:
            notes().print("\nstopped; this turn is forgotten", style="dim")
            return
        except Unavailable:
            raise
        except SluiceError as error:
            complain(describe(error, " or ".join(self._client.addresses)))
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]
