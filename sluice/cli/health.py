"""`sluice health`: shows whether routers and gateways serve, and the state of the engines and detokenizers."""

from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sluice.cli.common import Server, with_server
from sluice.cli.gateways import gateway_state, gateways_table
from sluice.client import Client, Forbidden, NotImplementedByServer, Unauthenticated
from sluice.v1 import admin_pb2

SERVICES = ("", "sluice.v1.GenerationService", "sluice.v1.ModelService", "sluice.v1.AdminService")
TIMEOUT_SECONDS = 5.0
PEER_STATES = {
    admin_pb2.PEER_STATE_DRAINING: "drains",
    admin_pb2.PEER_STATE_STALLED: "makes no progress",
    admin_pb2.PEER_STATE_UNREACHABLE: "cannot be reached by the router",
    admin_pb2.PEER_STATE_LOST: "sends no heartbeats any more",
    admin_pb2.PEER_STATE_UNKNOWN: "has not sent a heartbeat yet: it is loading or not running",
}
"""What is wrong with a peer in this state."""
FILE_WIDTH = 160
"""Columns of tables if stdout is not a terminal. rich would wrap them at 80."""


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
    console = _console()
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
    states = [gateway_state(address, TIMEOUT_SECONDS) for address in addresses]
    if states:
        _console().print(gateways_table(states))
    return [state.serves for state in states]


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


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
    table = Table("service", "state", box=SIMPLE)
    for service, serving in states.items():
        table.add_row(service or "all", "[green]serving[/green]" if serving else "[red]not serving[/red]")
    return table


def _engines(stats: admin_pb2.Stats) -> Table:
    table = Table("engine", "batch", "queued", "paused", "KV blocks", "tokens/s", "state", box=SIMPLE)
    for engine in stats.engines:
        table.add_row(
            engine.engine_id,
            f"{engine.scheduled_requests} of {engine.max_batch_size}",
            str(engine.queued_requests),
            str(engine.paused_requests),
            f"{engine.used_kv_blocks} of {engine.max_kv_blocks}",
            f"{engine.tokens_per_second:.0f}",
            "draining" if engine.draining else "serving",
        )
    return table


def detokenizers_table(stats: admin_pb2.Stats) -> Table:
    table = Table("detokenizer", "streams", "waiting", "tokens/s", box=SIMPLE)
    for detokenizer in stats.detokenizers:
        table.add_row(
            detokenizer.detokenizer_id,
            str(detokenizer.streams),
            str(detokenizer.queue_depth),
            f"{detokenizer.tokens_per_second:.0f}",
        )
    return table
