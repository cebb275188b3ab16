"""`sluice health`: shows whether routers and gateways serve, and the state of the engines and detokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated
from urllib.request import ProxyHandler, build_opener

import msgspec
import typer
from rich.box import SIMPLE
from rich.table import Table

from sluice.cli.common import TIMEOUT_SECONDS, Server, stdout_console, with_server
from sluice.cli.stats import COLUMNS, detokenizers_table
from sluice.client import Client, Forbidden, NotImplementedByServer, Unauthenticated
from sluice.telemetry.status_report import StatusReport
from sluice.top.panels import Column, table
from sluice.v1 import admin_pb2

SERVICES = ("", "sluice.v1.GenerationService", "sluice.v1.ModelService", "sluice.v1.AdminService")
PEER_STATES = {
    admin_pb2.PEER_STATE_DRAINING: "drains",
    admin_pb2.PEER_STATE_STALLED: "makes no progress",
    admin_pb2.PEER_STATE_UNREACHABLE: "cannot be reached by the router",
    admin_pb2.PEER_STATE_LOST: "sends no heartbeats any more",
    admin_pb2.PEER_STATE_UNKNOWN: "has not sent a heartbeat yet: it is loading or not running",
}
"""What is wrong with a peer in this state."""
ENGINE_COLUMNS = ("engine", "batch", "queued", "paused", "KV blocks", "tokens/s")
"""The columns of `sluice stats` that are shown."""


@with_server
def health(
    server: Server,
    gateways: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_GATEWAYS",
            metavar="HOST:PORT",
            help="Also show these HTTP gateways. The addresses are those of their metrics ports, separated by commas.",
        ),
    ] = "",
) -> None:
    """Show whether routers, engines, detokenizers and gateways serve.

    Exits with code 1 if a router or a gateway does not.
    """
    serving = [_show(router) for router in server.each()]
    serving += _show_gateways([address.strip() for address in gateways.split(",") if address.strip()])
    if not all(serving):
        raise typer.Exit(1)


def _show(server: Server) -> bool:
    """Print the state of one router. Returns whether it serves."""
    try:
        with server.client(timeout=TIMEOUT_SECONDS) as client:
            states = {service: client.health(service) for service in SERVICES}
            models = client.models()
            state, unavailable = _ring_state(client)
    except typer.Exit:
        # The error was printed. Continue with the other routers.
        return False
    console = stdout_console()
    served = ", ".join(model.name for model in models) or "no model"
    console.print(f"{server.addresses[0]} serves {served}", markup=False)
    console.print(_services(states))
    if state is None:
        console.print(f"no statistics of engines and detokenizers: {unavailable}", markup=False)
    else:
        info, stats = state
        for problem in problems(info):
            console.print(problem, style="red", markup=False, soft_wrap=True)
        console.print(_engines(stats), detokenizers_table(stats), sep="\n")
    return states[""]


def _show_gateways(addresses: list[str]) -> list[bool]:
    """Print the states of these gateways. Returns which of them serve."""
    states = [_gateway_state(address, TIMEOUT_SECONDS) for address in addresses]
    if states:
        stdout_console().print(_gateways(states))
    return [state.serves for state in states]


def _ring_state(client: Client) -> tuple[tuple[admin_pb2.GetServerInfoResponse, admin_pb2.Stats] | None, str]:
    """((server info, statistics), ""), or (None, the reason)."""
    try:
        return (client.server_info(), client.stats()), ""
    # This is no failure of the router: AdminService may be on another port or need another token.
    except (NotImplementedByServer, Unauthenticated, Forbidden) as error:
        return None, error.message


def problems(info: admin_pb2.GetServerInfoResponse) -> list[str]:
    """Why a router accepts no requests, or soon will not: it stays ready for a while after it has lost a peer."""
    found = ["the router drains and accepts no new requests"] if info.draining else []
    engines = [(engine.engine_id, engine.state) for engine in info.engines]
    detokenizers = [(each.detokenizer_id, each.state) for each in info.detokenizers]
    for kind, peers in (("engine", engines), ("detokenizer", detokenizers)):
        if any(state == admin_pb2.PEER_STATE_SERVING for _, state in peers):
            continue
        each = "; ".join(f"{name} {PEER_STATES[state]}" for name, state in peers if state in PEER_STATES)
        found.append(f"no {kind} accepts work: {each or f'the router knows no {kind}'}")
    return found


def _services(states: dict[str, bool]) -> Table:
    rows = Table("service", "state", box=SIMPLE)
    for service, serving in states.items():
        rows.add_row(service or "all", "[green]serving[/green]" if serving else "[red]not serving[/red]")
    return rows


def _engines(stats: admin_pb2.Stats) -> Table:
    state = Column("state", lambda engine: "draining" if engine.draining else "serving")
    columns = [*(column for column in COLUMNS if column.title in ENGINE_COLUMNS), state]
    return table([column._replace(right=False) for column in columns], stats.engines)


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What the metrics port at `address` says."""

    address: str
    id: str
    serves: bool
    problem: str = ""
    """Why the gateway does not serve."""


def _gateway_state(address: str, timeout: float) -> GatewayState:
    try:
        # Without the proxies of the environment: metrics ports are inside the cluster.
        with build_opener(ProxyHandler({})).open(f"http://{address}/status.json", timeout=timeout) as answer:
            status = msgspec.json.decode(answer.read(), type=StatusReport)
    except (OSError, ValueError, HTTPException) as error:
        return GatewayState(address, "", False, f"its metrics port does not answer: {error}")
    if status.service != "gateway":
        return GatewayState(address, status.id, False, f"it is a service of another kind: {status.service}")
    return GatewayState(address, status.id, status.ready, status.reason)


def _gateways(states: Sequence[GatewayState]) -> Table:
    rows = Table("gateway", "metrics", "state", box=SIMPLE)
    for state in states:
        text = "[green]serving[/green]" if state.serves else f"[red]not serving[/red]: {state.problem}"
        rows.add_row(state.id, state.address, text)
    return rows
