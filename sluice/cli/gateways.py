"""The states of HTTP gateways, read from their metrics ports."""

from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

import msgspec
from rich.box import SIMPLE
from rich.table import Table

from sluice.telemetry.status_report import StatusReport


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What the metrics port at `address` says."""

    address: str
    id: str
    serves: bool
    problem: str = ""
    """Why the gateway does not serve."""


def gateway_state(address: str, timeout: float) -> GatewayState:
    try:
        # Without the proxies of the environment: metrics ports are inside the cluster.
        with build_opener(ProxyHandler({})).open(f"http://{address}/status.json", timeout=timeout) as answer:
            status = msgspec.json.decode(answer.read(), type=StatusReport)
    except (OSError, ValueError, HTTPException) as error:
        return GatewayState(address, "", False, f"its metrics port does not answer: {error}")
    if status.service != "gateway":
        return GatewayState(address, status.id, False, f"it is a service of another kind: {status.service}")
    return GatewayState(address, status.id, status.ready, status.reason)


def gateways_table(states: Sequence[GatewayState]) -> Table:
    table = Table("gateway", "metrics", "state", box=SIMPLE)
    for state in states:
        text = "[green]serving[/green]" if state.serves else f"[red]not serving[/red]: {state.problem}"
        table.add_row(state.id, state.address, text)
    return table
