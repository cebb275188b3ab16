"""Shared parts of the commands: options for connecting to a server, one-line errors, tables."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sluice.client import (
    DEFAULT_ADDRESS,
    Client,
    ClientOptions,
    ConnectionLost,
    RouterLoras,
    RouterPromptAdapters,
    ServingVersion,
    SluiceError,
    TlsOptions,
    Unauthenticated,
    Unavailable,
    Unreachable,
    WrongServer,
)

OPTIONS = {
    "spec.text": "PROMPT",
    "spec.n": "--n",
    "spec.lora_id": "--lora",
    "spec.prompt_adapter_id": "--prompt-adapter",
    "spec.stopping.max_tokens": "--max-tokens",
    "spec.stopping.stop": "--stop",
    "spec.sampling.temperature": "--temperature",
    "spec.sampling.top_k": "--top-k",
    "spec.sampling.top_p": "--top-p",
    "spec.sampling.min_p": "--min-p",
    "spec.sampling.repetition_penalty": "--repetition-penalty",
    "spec.sampling.presence_penalty": "--presence-penalty",
    "spec.sampling.frequency_penalty": "--frequency-penalty",
    "spec.sampling.seed": "--seed",
    "spec.sampling.beam_search": "--beams",
    "spec.sampling.beam_search.width": "--beams",
    "spec.speculation.max_draft_tokens": "--max-draft-tokens",
    "spec.output.echo": "--echo",
    "spec.output.logprobs": "--logprobs",
    "spec.output.prompt_logprobs": "--prompt-logprobs",
    "spec.guided.json_schema": "--json-schema",
    "spec.guided.json_object": "--json",
    "spec.guided.regex": "--regex",
    "spec.guided.ebnf": "--grammar",
    "spec.guided.choice": "--choice",
    "spec.guided.choice.choices": "--choice",
}
"""The options of `sluice generate` by the field that they set. Other commands have some of them, by the same names."""
FIELD = re.compile(r"\bspec(?:\.[a-z_]+)+")
PEM = {"exists": True, "dir_okay": False, "metavar": "PEM"}
FILE_WIDTH = 160
"""Columns of tables if stdout is not a terminal. rich would wrap them at 80."""
TIMEOUT_SECONDS = 5.0
"""Timeout of each call that a command makes to show or change the state of routers."""


def stdout_console() -> Console:
    """A console on stdout, for tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def notes() -> Console:
    """A console on stderr, for everything except the command's result."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error to stderr, in one line."""
    notes().print(f"error: {' '.join(message.split())}", style="red", markup=False)


def fail(message: str) -> typer.Exit:
    """Print an error and return the exception to raise, which exits with code 1."""
    print_error(message)
    return typer.Exit(1)


def describe(error: SluiceError, address: str, names: Mapping[str, str] = OPTIONS) -> str:
    """The message for an error of a request to `address`. `names` are the user's names of API fields."""
    if isinstance(error, ConnectionLost):
        return f"the call to {address} was interrupted: {error.message}"
    # Without a reason, the error is not an answer of a router.
    if isinstance(error, Unavailable) and not isinstance(error, WrongServer) and not error.reason:
        cause = error.cause if isinstance(error, Unreachable) else error.message
        return f"no Sluice server answers at {address} ({cause}); start one with: sluice serve"
    if isinstance(error, Unauthenticated):
        return f"{error.message} (--token or SLUICE_TOKEN)"
    return with_option_names(error.message, names)


def with_option_names(message: str, names: Mapping[str, str] = OPTIONS) -> str:
    """The message with options in place of the fields that they set."""
    return FIELD.sub(lambda field: names.get(field[0], field[0]), message)


def describe_at(error: SluiceError, address: str) -> str:
    """Like `describe`, for one of several addresses: the message begins with the address or contains it."""
    text = describe(error, address)
    return text if address in text else f"{address}: {text}"


def check_answers(answers: Sequence[RouterLoras | RouterPromptAdapters | ServingVersion]) -> None:
    """Print the error of each router that failed. Raises typer.Exit if one did."""
    failed = [(answer.address, answer.error) for answer in answers if answer.error is not None]
    for address, error in failed:
        print_error(describe_at(error, address))
    if failed:
        raise typer.Exit(1)


def with_options(
    make: Callable[..., Any], name: str, omit: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds the parameters of `make` to a command's options and passes its result as parameter `name`.

    Parameters in `omit` do not become options and keep their defaults.
    """
    shared = {key: value for key, value in inspect.signature(make).parameters.items() if key not in omit}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            value = make(**{key: options.pop(key) for key in shared})
            command(**{name: value}, **options)

        # typer reads a command's options from its signature and annotations. Shared options come last in the help.
        own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != name]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


@dataclass(frozen=True, slots=True)
class Server:
    """Routers of one ring and the credentials for them."""

    addresses: tuple[str, ...]
    tls: TlsOptions | None = None
    token: str | None = None
    tenant: str | None = None

    @contextmanager
    def client(self, timeout: float | None = None) -> Iterator[Client]:
        """A client. If it raises SluiceError, prints one line to stderr and exits with code 1.

        Without `timeout`, reports to stderr when a call waits for a router that is gone.
        """
        options = ClientOptions(timeout=timeout, tls=self.tls, token=self.token, tenant=self.tenant)
        if timeout is None:
            options["on_waiting"] = self._report_wait
        try:
            client = Client(self.addresses, **options)
        except (ValueError, OSError) as error:
            raise fail(str(error)) from error
        try:
            with client:
                yield client
        except SluiceError as error:
            raise fail(describe(error, " or ".join(self.addresses))) from error

    def _report_wait(self, seconds: float) -> None:
        addresses = " or ".join(self.addresses)
        # On a line of its own: stdout may be in the middle of one, on the same terminal.
        line_break = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
        text = f"no router at {addresses} accepts calls now; waiting up to {seconds:.0f} s (Ctrl-C ends)"
        notes().print(line_break + text, style="dim", markup=False)

    def each(self) -> "list[Server]":
        """One server per address."""
        return [replace(self, addresses=(address,)) for address in self.addresses]


def _server(
    address: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_ADDRESS",
            metavar="HOST:PORT",
            help="Address of the server. Separate the addresses of several routers with commas.",
        ),
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="SLUICE_TLS_CA", help="Use TLS and trust these certificate authorities.", **PEM),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="SLUICE_TLS_CERT", help="Client certificate, for servers that ask for one.", **PEM),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="SLUICE_TLS_KEY", help="Private key of the client certificate.", **PEM)
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="SLUICE_TOKEN", metavar="TOKEN", help="Bearer token to authenticate with.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(envvar="SLUICE_TENANT", metavar="TENANT", help="Tenant to make the requests for.")
    ] = None,
) -> Server:
    addresses = tuple(filter(None, map(str.strip, address.split(","))))
    try:
        tls = TlsOptions(tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else None
    except ValueError as error:
        raise fail(f"--tls-cert and --tls-key: {error}") from error
    return Server(addresses, tls, token or None, tenant or None)


with_server = with_options(_server, "server")
"""Adds the options for connecting to a server, and passes a Server as the parameter `server`."""
with_server_without_token = with_options(_server, "server", omit=("token",))
"""Like `with_server`, for a command that declares --token itself."""
