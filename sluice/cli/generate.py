"""`sluice generate`: one completion, streamed to the terminal."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from sluice.cli.common import (
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    TopP,
    notes,
)
from sluice.cli.server import Server, asks_server
from sluice.client import FinishReason, Stream


@asks_server
def generate(
    server: Server,
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; may be given several times")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too")] = False,
) -> None:
    """Complete a text. The completion goes to stdout, and nothing else."""
    prompt = sys.stdin.read() if text == "-" else text
    with server.client() as client:
        start = partial(
            client.stream,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            echo=echo or None,
        )
        print_stream(start)


def print_stream(start: Callable[[], Stream]) -> str:
    """Start a stream, write its text to stdout as it comes, and a summary to stderr if that is a terminal.

    Returns the text.
    """
    texts: list[str] = []
    reason: FinishReason | None = None
    times = Times(time.monotonic())
    with start() as stream:
        for chunk in stream:
            if chunk.token_count:
                times.token(time.monotonic())
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            texts.append(chunk.text)
            reason = chunk.finish_reason or reason
    text = "".join(texts)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if sys.stderr.isatty():
        notes().print(summarize(stream, reason, times, time.monotonic()), style="dim", markup=False)
    return text


@dataclass(slots=True)
class Times:
    """Of a stream, on the monotonic clock."""

    request: float
    first_token: float | None = None

    def token(self, now: float) -> None:
        """A chunk brought tokens."""
        if self.first_token is None:
            self.first_token = now


def summarize(stream: Stream, reason: FinishReason | None, times: Times, now: float) -> str:
    """Counts and speed of an ended stream. Times count from the request, so tokens/s includes the first token's."""
    if stream.usage is None:
        return "no usage"
    usage = stream.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    first = "" if times.first_token is None else f"first token after {times.first_token - times.request:.2f} s · "
    seconds = now - times.request
    rate = usage.completion_tokens / seconds if seconds > 0 else 0
    return (
        f"{usage.prompt_tokens} prompt tokens{cached} · {usage.completion_tokens} new in {seconds:.2f} s · "
        f"{first}{rate:.1f} tokens/s from request to end · ended by {reason}"
    )
