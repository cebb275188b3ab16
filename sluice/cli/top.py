"""`sluice top`: monitors the ring in a terminal."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group

from sluice.cli.common import Server, describe_at, fail, print_error, stdout_console, with_server
from sluice.client import DeadlineExceeded, SluiceError
from sluice.top.panels import ORDERS, PANELS, shown_columns, table
from sluice.top.snapshot import Snapshot, combine, query

TIMEOUT_SECONDS = 2.0
"""For each call to a router."""


@with_server
def top(
    server: Server,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once and exit. The default if stdout is not a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object.")] = False,
) -> None:
    """Monitor the ring in a full-screen view.

    Shows engines, detokenizers, routers, tenants and requests. With --once, exits with code 1 if no router answers.
    """
    console = stdout_console()
    if as_json and not once:
        raise fail("--json needs --once")
    with ExitStack() as stack:
        clients = [stack.enter_context(router.client(TIMEOUT_SECONDS)) for router in server.each()]
        # In parallel, so that a router that does not answer does not delay the others.
        threads = stack.enter_context(ThreadPoolExecutor(len(clients)))

        def read() -> Snapshot:
            return combine(list(threads.map(lambda client: query(client, _describe), clients)))

        if once or not console.is_terminal:
            _print(console, read(), as_json)
        else:
            _watch(read, interval)


def _describe(error: SluiceError, address: str) -> str:
    """One line with the address, the cause, and what to check."""
    if isinstance(error, DeadlineExceeded) and not error.reason:
        return f"{address} did not answer within {TIMEOUT_SECONDS:.0f} s: check that a router listens there"
    return describe_at(error, address)


def _watch(read: Callable[[], Snapshot], interval: float) -> None:
    try:
        from sluice.top.app import TopApp
    except ModuleNotFoundError as error:
        raise fail(
            "the full-screen view needs the extra top: pip install 'sluice-serve[top]'; --once works without it"
        ) from error
    TopApp(read, interval).run()


def _print(console: Console, snapshot: Snapshot, as_json: bool) -> None:
    """Print the snapshot, and a line on stderr for each router that did not answer. Raises typer.Exit if none did."""
    failed = [router for router in snapshot.routers if router.error]
    none_answered = len(failed) == len(snapshot.routers)
    if as_json:
        print(msgspec.json.encode(snapshot).decode())
    elif not none_answered:
        console.print(tables(snapshot, console.width))
    for router in failed:
        print_error(router.error)
    if none_answered:
        raise typer.Exit(1)


def tables(snapshot: Snapshot, width: int) -> Group:
    """The panels as tables, one below the other; panels without rows are omitted."""
    filled = ((panel, rows) for panel in PANELS if (rows := panel.rows(snapshot, ORDERS[0])))
    return Group(*(table(shown_columns(panel.columns, width), rows) for panel, rows in filled))
