"""`sluice generate`: completes a prompt and streams the output to the terminal."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sluice.cli.common import Server, notes, with_server
from sluice.cli.sampling import with_sampling
from sluice.cli.stream_printer import print_stream
from sluice.client import Client, Options, Prompt, SluiceError


class GenerateCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises a usage error with a hint if the prompt is not quoted."""
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            prompt = " ".join([ctx.params["text"], *extra])
            ctx.fail(f"the prompt must be one argument: put it in quotes, as in {shlex.quote(prompt)}")
        return extra


@with_server
@with_sampling
def generate(
    server: Server,
    options: Options,
    text: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt. - reads it from stdin.")],
    n: Annotated[
        int,
        typer.Option(
            "--n",
            "-n",
            metavar="N",
            min=1,
            help="Number of outputs. Several outputs are printed in order, each under its index. With --beams: the N "
            "best outputs.",
        ),
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, as instruct models expect it.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Constrain the output to the JSON Schema in this file.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json", help="Constrain the output to a JSON object.")] = False,
    regex: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Constrain the output to this regular expression.")
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Constrain the output to the grammar in this file (GBNF or Lark)."),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Constrain the output to one of the given choices. Repeat for each choice."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Image to send before the prompt, both as one chat message. Repeatable."),
    ] = None,
    beams: Annotated[
        int | None,
        typer.Option(metavar="WIDTH", help="Use beam search with this many beams. The outputs arrive at the end."),
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Draft tokens per step for speculative decoding. 0: none. Affects the speed, not the output. "
            "Default: the engine's setting.",
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before each output.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="TOP",
            help="Write the log-probability of each output token to stderr, with those of the TOP most likely tokens.",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(metavar="TOP", help="Like --logprobs, for each token of the prompt.")
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Write the summary (times, tokens/s) to stderr even if that is not a terminal."),
    ] = False,
) -> None:
    """Complete a prompt.

    Only the output is written to stdout. A summary is written to stderr if that is a terminal, or with --stats.
    """
    prompt = _prompt(sys.stdin.read() if text == "-" else text, image or [], chat=chat)
    options |= Options(echo=echo or None, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    guided = _guide(json_schema, regex, grammar, choice, json_object=json_object)
    if guided:
        options["guided"] = guided
    if max_draft_tokens is not None:
        options["speculation"] = {"max_draft_tokens": max_draft_tokens}
    if beams is not None:
        options["beam_search"] = {"width": beams}
    if n > 1:
        options["n"] = n
    with server.client() as client:
        texts = print_stream(partial(client.stream, prompt, **options), n, stats=stats)
        if isinstance(prompt, str) and not any(texts) and _has_chat_template(client):
            hint = "the model ended its output at once; it has a chat template, and --chat sends the prompt with it"
            notes().print(hint, style="dim")


def _has_chat_template(client: Client) -> bool:
    try:
        return any("chat" in model.capabilities for model in client.models())
    except SluiceError:
        # The command has done its work without this call.
        return False


def _prompt(text: str, files: list[Path], *, chat: bool) -> Prompt:
    """`text`, or with `chat` or images a chat message. Images come first, as chat templates order them.

    Raises typer.BadParameter.
    """
    if not files:
        return [{"role": "user", "content": text}] if chat else text
    try:
        images = [{"type": "image", "data": file.read_bytes()} for file in files]
    except OSError as error:
        raise typer.BadParameter(f"--image: {error.filename} cannot be read: {error.strerror}") from error
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def _guide(
    json_schema: Path | None, regex: str | None, grammar: Path | None, choice: list[str] | None, *, json_object: bool
) -> dict[str, Any]:
    """The field to set in sluice.v1.GuidedDecoding. Raises typer.BadParameter if several are given."""
    fields: dict[str, Any] = {
        "json_schema": _read_schema(json_schema),
        "json_object": {} if json_object else None,
        "regex": regex,
        "ebnf": _read(grammar, "--grammar"),
        "choice": {"choices": choice} if choice else None,
    }
    guides = {name: value for name, value in fields.items() if value is not None}
    if len(guides) > 1:
        raise typer.BadParameter("only one of --json-schema, --json, --regex, --grammar and --choice can be given")
    return guides


def _read_schema(path: Path | None) -> str | None:
    """The text of a schema. Raises typer.BadParameter with the place of the error if it is not JSON."""
    text = _read(path, "--json-schema")
    if text is not None:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"--json-schema: {path}:{error.lineno}:{error.colno}: {error.msg}") from error
        except RecursionError as error:
            raise typer.BadParameter(f"--json-schema: {path} is nested too deeply") from error
    return text


def _read(path: Path | None, option: str) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(f"{option}: {path} cannot be read: {reason}") from error
