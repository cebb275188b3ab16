"""`sluice top`: the whole ring on a terminal."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table

from sluice.cli.common import Server, asks_server, fail
from sluice.cli.health import FILE_WIDTH
from sluice.top.panels import ORDERS, PANELS
from sluice.top.snapshot import Snapshot, ask, combine

TIMEOUT_SECONDS = 2.0


@asks_server
def top(
    server: Server,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once; the default unless stdout is a terminal")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: as one JSON object")] = False,
) -> None:
    """Watch engines, detokenizers, routers, tenants and requests. Exit code 1 if --once finds no router."""
    console = Console(highlight=False)
    if as_json and not once:
        raise fail("--json needs --once")
    with ExitStack() as stack:
        clients = [stack.enter_context(each.client(TIMEOUT_SECONDS)) for each in server.each()]

        # At once: a router that does not answer delays no other.
        threads = stack.enter_context(ThreadPoolExecutor(len(clients)))

        def read() -> Snapshot:
            return combine(list(threads.map(ask, clients)))

        if once or not console.is_terminal:
            _print(console, read(), as_json)
        else:
            _watch(read, interval)


def _watch(read: Callable[[], Snapshot], interval: float) -> None:
    try:
        from sluice.top.app import TopApp
    except ModuleNotFoundError as error:
        raise fail("the screen needs the extra top: pip install 'sluice-serve[top]'; --once works without") from error
    TopApp(read, interval).run()


def _print(console: Console, found: Snapshot, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        console.width = console.width if console.is_terminal else FILE_WIDTH
        console.print(tables(found))
    failed = [router for router in found.routers if router.error]
    if len(failed) == len(found.routers):
        raise fail("; ".join(f"{router.address}: {router.error}" for router in failed))


def tables(found: Snapshot) -> Group:
    """A panel after the other; those without rows are left out."""
    made = []
    for panel in PANELS:
        rows = panel.rows(found, ORDERS[0])
        table = Table(box=SIMPLE)
        for column in panel.columns:
            table.add_column(column.title, justify="right" if column.right else "left")
        for row in rows:
            table.add_row(*(column.cell(row) for column in panel.columns))
        if rows:
            made.append(table)
    return Group(*made)
