"""The options of all commands that call a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.common import fail, one_line_errors, with_options
from sluice.client import DEFAULT_ADDRESS, Client, TlsOptions

PEM = {"exists": True, "dir_okay": False}


@dataclass(frozen=True, slots=True)
class Server:
    """Addresses and credentials."""

    addresses: tuple[str, ...]
    tls: TlsOptions | None = None
    token: str | None = None
    tenant: str | None = None

    @contextmanager
    def client(self, timeout: float | None = None) -> Iterator[Client]:
        """A client; an error becomes one line on stderr and exit code 1."""
        with one_line_errors(" or ".join(self.addresses)):
            try:
                client = Client(self.addresses, timeout=timeout, tls=self.tls, token=self.token, tenant=self.tenant)
            except (ValueError, OSError) as error:
                raise fail(str(error)) from error
            with client:
                yield client

    def each(self) -> "list[Server]":
        """One server per address."""
        return [Server((address,), self.tls, self.token, self.tenant) for address in self.addresses]


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
