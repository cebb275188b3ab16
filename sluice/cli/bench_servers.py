"""The servers that `sluice bench` measures: how the command line names them, and how they are connected to."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import typer

from sluice.cli.common import Server, describe
from sluice.client import Options, SluiceError, TlsOptions
from sluice.loadgen.grpc_target import GrpcTarget
from sluice.loadgen.target import Target, TargetError

Api = Literal["grpc", "openai"]
NAMED = re.compile(r"([^=/]+)=(.+)")
HTTP = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class BenchServer:
    name: str
    """In the table; its address if the caller gave none."""
    api: Api
    addresses: tuple[str, ...]
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """Of all servers alike."""

    model: str
    """Empty: the first that the server lists."""
    chat: bool
    temperature: float
    ignore_eos: bool
    timeout: float | None
    """Seconds per request."""


def read_servers(given: Sequence[str], api: Api | None, default: Sequence[str]) -> list[BenchServer]:
    """From `ADDRESS` or `NAME=ADDRESS` each. `api` None: as the form of the address says. Raises typer.BadParameter."""
    if not given:
        if api == "openai":
            raise typer.BadParameter("--api openai needs the ADDRESS of the server")
        return [BenchServer(",".join(default), "grpc", tuple(default))]
    servers = [_read(each, api) for each in given]
    names = [each.name for each in servers]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"two servers are called {repeated}: name them apart, as NAME=ADDRESS")
    return servers


def _read(given: str, api: Api | None) -> BenchServer:
    named = NAMED.fullmatch(given)
    name, address = named.groups() if named else (given, given)
    found = api or ("openai" if address.startswith(HTTP) else "grpc")
    addresses = tuple(address.split(","))
    if found == "openai" and len(addresses) > 1:
        raise typer.BadParameter(f"{given}: a server with OpenAI's API has one address")
    return BenchServer(name, found, addresses)


def give_tokens(servers: Sequence[BenchServer], tokens: Sequence[str]) -> list[BenchServer]:
    """From `NAME=TOKEN` each, or one `TOKEN` for a single server: a server never gets the token of another one.

    Raises typer.BadParameter.
    """
    found: dict[str, str] = {}
    for each in tokens:
        named = [server.name for server in servers if each.startswith(f"{server.name}=")]
        name = max(named, key=len, default=servers[0].name if len(servers) == 1 else None)
        if name is None:
            names = ", ".join(server.name for server in servers)
            raise typer.BadParameter(f"--token: with several servers, give NAME=TOKEN, where NAME is one of {names}")
        if name in found:
            raise typer.BadParameter(f"--token: {name} has two")
        found[name] = each.removeprefix(f"{name}=")
    return [replace(server, token=found.get(server.name) or None) for server in servers]


async def connect(server: BenchServer, access: Server, asked: Asked) -> Target:
    """Raises TargetError, OSError."""
    if server.api == "grpc":
        options = Options(temperature=asked.temperature, ignore_eos=asked.ignore_eos or None)
        connection = {"timeout": asked.timeout, "tls": access.tls, "token": server.token, "tenant": access.tenant}
        try:
            return await GrpcTarget.open(server.addresses, asked.model, options, chat=asked.chat, **connection)
        except SluiceError as error:
            raise TargetError(describe(error, " or ".join(server.addresses))) from error
    # Slow to import, and needed here alone.
    from sluice.loadgen.openai_target import OpenAITarget

    return await OpenAITarget.open(
        server.addresses[0],
        asked.model,
        {"temperature": asked.temperature} | ({"ignore_eos": True} if asked.ignore_eos else {}),
        chat=asked.chat,
        token=server.token,
        tls=_certificates(access.tls),
        timeout=asked.timeout,
    )


def _certificates(tls: TlsOptions | None) -> ssl.SSLContext:
    """Raises OSError for a file that cannot be read."""
    context = ssl.create_default_context(cafile=None if tls is None else tls.ca)
    if tls is not None and tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context
