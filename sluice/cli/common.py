"""Shared by the commands: options of a generation, the server that a command calls, one-line errors."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sluice.client import DEFAULT_ADDRESS, Client, SluiceError, TlsOptions, Unavailable

MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of new tokens; default: what fits the context")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0: from all")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens of this probability mass")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text")]
Adapter = Annotated[str | None, typer.Option(help="LoRA adapter to use, by its id")]
TunedPrompt = Annotated[str | None, typer.Option("--prompt-adapter", help="Prompt adapter to use, by its id")]
HTTP_1 = "http1.x server"
"""In gRPC's message about a server without HTTP/2."""
PEM = {"exists": True, "dir_okay": False}


def notes() -> Console:
    """stderr, for everything but the command's result."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """On one line."""
    notes().print(f"error: {' '.join(message.split())}", style="red", markup=False)


def fail(message: str) -> typer.Exit:
    """Print an error; the caller raises the result to exit with code 1."""
    print_error(message)
    return typer.Exit(1)


def describe(error: SluiceError, address: str) -> str:
    # Without a reason no router has answered: the message is gRPC's, with the cause at its end.
    if isinstance(error, Unavailable) and not error.reason:
        if HTTP_1 in error.message:
            return f"{address} speaks HTTP/1, as a gateway does: give a router's address, by default {DEFAULT_ADDRESS}"
        cause = error.message.rsplit(": ", 1)[-1]
        return f"no Sluice server answers at {address} ({cause}); start one with: sluice serve"
    return error.message


def with_options(
    make: Callable[..., Any], name: str, but: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: adds the parameters of `make` to a command's options and passes its result as the parameter `name`.

    `but`: parameters that keep their default.
    """
    shared = {each: value for each, value in inspect.signature(make).parameters.items() if each not in but}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            made = make(**{each: options.pop(each) for each in shared})
            command(**{name: made}, **options)

        # typer reads a command's options from its signature and annotations.
        own = (each for each in inspect.signature(command).parameters.values() if each.name != name)
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


@dataclass(frozen=True, slots=True)
class Server:
    addresses: tuple[str, ...]
    tls: TlsOptions | None = None
    token: str | None = None
    tenant: str | None = None

    @contextmanager
    def client(self, timeout: float | None = None) -> Iterator[Client]:
        """A client; an error becomes one line on stderr and exit code 1."""
        try:
            client = Client(self.addresses, timeout=timeout, tls=self.tls, token=self.token, tenant=self.tenant)
        except (ValueError, OSError) as error:
            raise fail(str(error)) from error
        try:
            with client:
                yield client
        except SluiceError as error:
            raise fail(describe(error, " or ".join(self.addresses))) from error

    def each(self) -> "list[Server]":
        """One server per address."""
        return [replace(self, addresses=(address,)) for address in self.addresses]


def _server(
    address: Annotated[
        str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server; several routers separated by commas")
    ] = DEFAULT_ADDRESS,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="SLUICE_TLS_CA", help="Use TLS and trust these authorities (PEM)", **PEM)
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="SLUICE_TLS_CERT", help="Certificate of this client (PEM)", **PEM)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="SLUICE_TLS_KEY", help="Its key (PEM)", **PEM)] = None,
    token: Annotated[str | None, typer.Option(envvar="SLUICE_TOKEN", help="Bearer token")] = None,
    tenant: Annotated[str | None, typer.Option(envvar="SLUICE_TENANT", help="Tenant of the requests")] = None,
) -> Server:
    addresses = tuple(filter(None, map(str.strip, address.split(","))))
    try:
        tls = TlsOptions(tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else None
    except ValueError as error:
        raise fail(f"--tls-cert and --tls-key: {error}") from error
    return Server(addresses, tls, token or None, tenant or None)


asks_server = with_options(_server, "server")
asks_server_without_token = with_options(_server, "server", but=("token",))
