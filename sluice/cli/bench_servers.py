"""The servers that `sluice bench` measures: parses them from the command line and connects to them."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import typer

from sluice.cli.common import Server, describe
from sluice.client import ClientOptions, SluiceError, TlsOptions
from sluice.loadgen.grpc_target import GrpcTarget
from sluice.loadgen.target import RequestOptions, Target, TargetError

Api = Literal["grpc", "openai"]
NAMED = re.compile(r"([^=/]+)=(.+)")
HTTP = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class BenchServer:
    name: str
    """Shown in the table. Its address if the user gave no name."""
    api: Api
    addresses: tuple[str, ...]
    token: str | None = field(default=None, repr=False)


def read_servers(arguments: Sequence[str], api: Api | None, default: Sequence[str]) -> list[BenchServer]:
    """Parse arguments of the form ADDRESS or NAME=ADDRESS. Raises typer.BadParameter.

    `api` None: determined by the form of the address. `default`: addresses of the ring to measure without arguments.
    """
    if not arguments:
        if api == "openai":
            raise typer.BadParameter("--api openai needs the ADDRESS of the server")
        return [BenchServer(",".join(default), "grpc", tuple(default))]
    servers = [_read(argument, api) for argument in arguments]
    names = [server.name for server in servers]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"two servers are called {repeated}: give them different names, as NAME=ADDRESS")
    return servers


def _read(argument: str, api: Api | None) -> BenchServer:
    named = NAMED.fullmatch(argument)
    name, address = named.groups() if named else (argument, argument)
    server_api = api or ("openai" if address.startswith(HTTP) else "grpc")
    addresses = tuple(address.split(","))
    if server_api == "openai" and len(addresses) > 1:
        raise typer.BadParameter(f"{argument}: a server with OpenAI's API must have one address")
    return BenchServer(name, server_api, addresses)


def assign_tokens(servers: Sequence[BenchServer], arguments: Sequence[str]) -> list[BenchServer]:
    """The servers with their tokens, from arguments NAME=TOKEN, or one TOKEN for a single server.

    No server is sent the token of another one. Raises typer.BadParameter.
    """
    tokens: dict[str, str] = {}
    for argument in arguments:
        matching = [server.name for server in servers if argument.startswith(f"{server.name}=")]
        name = max(matching, key=len, default=servers[0].name if len(servers) == 1 else None)
        if name is None:
            names = ", ".join(server.name for server in servers)
            raise typer.BadParameter(f"--token: with several servers, give NAME=TOKEN, where NAME is one of {names}")
        if name in tokens:
            raise typer.BadParameter(f"--token: {name} has two tokens")
        tokens[name] = argument.removeprefix(f"{name}=")
    return [replace(server, token=tokens.get(server.name) or None) for server in servers]


async def connect(server: BenchServer, access: Server, options: RequestOptions) -> Target:
    """Open the connections to a server. Raises TargetError, OSError."""
    if server.api == "grpc":
        connection = ClientOptions(timeout=options.timeout, tls=access.tls, token=server.token, tenant=access.tenant)
        try:
            return await GrpcTarget.open(server.addresses, options, connection)
        except SluiceError as error:
            raise TargetError(describe(error, " or ".join(server.addresses))) from error
    # Imported here because it is slow to import and only needed here.
    from sluice.loadgen.openai_target import OpenAITarget

    return await OpenAITarget.open(server.addresses[0], options, server.token, _certificates(access.tls))


def _certificates(tls: TlsOptions | None) -> ssl.SSLContext:
    """The certificate authorities to trust and the client certificate. Raises OSError if a file cannot be read."""
    context = ssl.create_default_context(cafile=None if tls is None else tls.ca)
    if tls is not None and tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context
