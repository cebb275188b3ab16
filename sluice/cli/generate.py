"""`sluice generate`: one completion, streamed to the terminal."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.common import Adapter, MaxTokens, Seed, Server, Temperature, TopK, TopP, TunedPrompt, asks_server, notes
from sluice.client import FinishReason, Options, Prompt, Stream


@asks_server
def generate(
    server: Server,
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    lora: Adapter = None,
    prompt_adapter: TunedPrompt = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="File of a JSON Schema that the output follows")] = None,
    json_object: Annotated[bool, typer.Option("--json", help="The output is a JSON object")] = False,
    regex: Annotated[str | None, typer.Option(help="Expression that the output matches")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File of a grammar (GBNF or Lark) for the output")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The output is this or another choice; repeatable")] = None,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens that are guessed and checked per step; 0: none. Speed, not output")
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Beams to search with; the output comes at the end")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Image file to ask about: with the text, a message of a chat; repeatable")
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt first")] = False,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Write each prompt token's log-probability to stderr, with so many alternatives")
    ] = None,
) -> None:
    """Complete a text. Only the completion is written to stdout."""
    prompt = _with_images(sys.stdin.read() if text == "-" else text, image or [])
    options = Options(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    options |= Options(lora_id=lora, prompt_adapter_id=prompt_adapter, stop=stop)
    options |= Options(echo=echo or None, prompt_logprobs=prompt_logprobs)
    guided = _guide(json_schema, regex, grammar, choice, json_object=json_object)
    if guided:
        options["guided"] = guided
    if max_draft_tokens is not None:
        options["speculation"] = {"max_draft_tokens": max_draft_tokens}
    if beams is not None:
        options["beam_search"] = {"width": beams}
    with server.client() as client:
        print_stream(partial(client.stream, prompt, **options))


def _with_images(text: str, files: list[Path]) -> Prompt:
    """Images first, where chat templates put them too. Raises typer.BadParameter."""
    if not files:
        return text
    try:
        images = [{"type": "image", "data": file.read_bytes()} for file in files]
    except OSError as error:
        raise typer.BadParameter(f"--image: {error.filename} cannot be read: {error.strerror}") from error
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def write_prompt_logprobs(stream: Stream) -> None:
    """To stderr, a line per token: log-probability, rank, token, and the alternatives with theirs."""
    for entry in stream.prompt_logprobs:
        if entry.logprob is None:
            cells = ["", "", _shown(entry.token)]
        else:
            best = [f"{_shown(other.token)} {other.logprob:.3f}" for other in entry.top]
            cells = [f"{entry.logprob:.3f}", str(entry.rank), _shown(entry.token), *best]
        sys.stderr.write("\t".join(cells) + "\n")


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace"))


def _guide(
    json_schema: Path | None, regex: str | None, grammar: Path | None, choice: list[str] | None, *, json_object: bool
) -> dict[str, Any]:
    """The fields of sluice.v1.GuidedDecoding that are set. Raises typer.BadParameter for several."""
    found: dict[str, Any] = {
        "json_schema": _read(json_schema, "--json-schema"),
        "json_object": {} if json_object else None,
        "regex": regex,
        "ebnf": _read(grammar, "--grammar"),
        "choice": {"choices": choice} if choice else None,
    }
    guides = {name: value for name, value in found.items() if value is not None}
    if len(guides) > 1:
        raise typer.BadParameter("only one of --json-schema, --json, --regex, --grammar and --choice can be given")
    return guides


def _read(path: Path | None, option: str) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(f"{option}: {path} cannot be read: {reason}") from error


def print_stream(start: Callable[[], Stream]) -> str:
    """Write a stream to stdout as it arrives, and a summary to stderr if that is a terminal. Returns the text."""
    texts: list[str] = []
    reason: FinishReason | None = None
    started = time.monotonic()
    first_token: float | None = None
    with start() as stream:
        for chunk in stream:
            # An echoed prompt comes first and has no tokens.
            if chunk.token_count and first_token is None:
                first_token = time.monotonic() - started
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            texts.append(chunk.text)
            reason = chunk.finish_reason or reason
    write_prompt_logprobs(stream)
    text = "".join(texts)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if sys.stderr.isatty():
        summary = summarize(stream, reason, first_token, time.monotonic() - started)
        notes().print(summary, style="dim", markup=False)
    return text


def summarize(stream: Stream, reason: FinishReason | None, first_token: float | None, seconds: float) -> str:
    """Counts and speed of an ended stream; both times in seconds from the request."""
    usage = stream.usage
    if usage is None:
        return "no usage"
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    first = "" if first_token is None else f"first token after {first_token:.2f} s · "
    rate = usage.completion_tokens / seconds if seconds > 0 else 0
    return (
        f"{usage.prompt_tokens} prompt tokens{cached} · {usage.completion_tokens} new in {seconds:.2f} s · "
        f"{first}{rate:.1f} tokens/s from request to end · ended by {reason}"
    )
