"""`sluice generate`: one completion, streamed to the terminal."""

import sys
import time
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
        stream = client.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            echo=echo or None,
        )
        print_stream(stream)


def print_stream(stream: Stream) -> str:
    """Write a stream's text to stdout as it comes, and a summary to stderr if that is a terminal. Returns the text."""
    start = time.monotonic()
    texts: list[str] = []
    reason: FinishReason | None = None
    with stream:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            texts.append(chunk.text)
            reason = chunk.finish_reason or reason
    text = "".join(texts)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if sys.stderr.isatty():
        notes().print(summarize(stream, reason, time.monotonic() - start), style="dim", markup=False)
    return text


def summarize(stream: Stream, reason: FinishReason | None, seconds: float) -> str:
    """Counts and speed of an ended stream."""
    if stream.usage is None:
        return "no usage"
    usage = stream.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    rate = usage.completion_tokens / seconds if seconds > 0 else 0
    return (
        f"{usage.prompt_tokens} prompt tokens{cached} · {usage.completion_tokens} new · "
        f"{seconds:.2f} s · {rate:.0f} tokens/s · ended by {reason}"
    )
