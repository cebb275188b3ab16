"""The screen of `sluice top`. The only module that imports the optional package textual."""

import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, Sparkline, Static
from textual.worker import get_current_worker

from sluice.top.panels import DETOKENIZERS, ENGINES, ORDERS, PANELS, REQUESTS, ROUTERS, TENANTS, Panel, shown_columns
from sluice.top.snapshot import Snapshot

SPARKLINE_SNAPSHOTS = 120
"""Snapshots in the line of tokens per second."""


class TopApp(App[None]):
    """Reads a snapshot every `interval` seconds, in a thread, and shows it."""

    CSS = """
    Screen { background: $background; }
    #head { height: 1; padding: 0 1; }
    Sparkline { height: 2; margin: 0 1 1 1; }
    Sparkline > .sparkline--min-color { color: $primary-darken-1; }
    Sparkline > .sparkline--max-color { color: $primary; }
    DataTable { height: auto; border: round $surface-lighten-2; background: $background; }
    DataTable { border-title-color: $text-muted; }
    #engines { max-height: 40%; }
    Horizontal { height: auto; max-height: 30%; }
    Horizontal DataTable { width: auto; margin-right: 1; }
    #tenants { width: 1fr; margin-right: 0; }
    #requests { width: 100%; height: 1fr; min-height: 5; }
    .-medium Horizontal { layout: grid; grid-size: 2; grid-columns: auto 1fr; grid-rows: auto; grid-gutter: 0 1; }
    .-medium Horizontal { max-height: 50%; }
    .-medium Horizontal DataTable { margin-right: 0; }
    .-medium #tenants { column-span: 2; }
    .-narrow Horizontal { layout: vertical; max-height: 60%; }
    .-narrow Horizontal DataTable { width: 1fr; margin-right: 0; }
    .-low Sparkline, .-low #tenants { display: none; }
    """
    # Panels are side by side only where the terminal is wide enough. textual declares neither attribute as ClassVar.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (118, "-medium"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-high")]  # noqa: RUF012
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("s", "sort", "sort"),
    ]

    def __init__(self, read: Callable[[], Snapshot], interval: float) -> None:
        super().__init__()
        self._read, self._interval = read, interval
        self._speeds: deque[float] = deque([0.0], maxlen=SPARKLINE_SNAPSHOTS)
        self._latest: Snapshot | None = None
        self._order = ORDERS[0]
        self._paused = False

    def compose(self) -> ComposeResult:
        yield Static("sluice top", id="head")
        yield Sparkline(list(self._speeds), id="speed")
        yield self._table(ENGINES)
        with Horizontal():
            for panel in (DETOKENIZERS, ROUTERS, TENANTS):
                yield self._table(panel)
        yield self._table(REQUESTS)
        yield Footer()

    def on_mount(self) -> None:
        self._poll()

    def action_pause(self) -> None:
        """Stop or resume updating the panels. Snapshots are still read, for the line of tokens per second."""
        self._paused = not self._paused
        self._show()

    def action_sort(self) -> None:
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._show()

    @work(thread=True, exclusive=True)
    def _poll(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            snapshot = self._read()
            if not worker.is_cancelled:
                self.call_from_thread(self._on_snapshot, snapshot)
            end = time.monotonic() + self._interval
            # Sleep in short pieces, so that quitting does not wait for a whole interval.
            while not worker.is_cancelled and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        # A snapshot may arrive while the program is ending and widgets have already been removed.
        if not self.is_running:
            return
        self._speeds.append(snapshot.tokens_per_second)
        if not self._paused or self._latest is None:
            self._latest = snapshot
            self._show()

    def _show(self) -> None:
        snapshot = self._latest
        self.query_one("#head", Static).update(self._head(snapshot))
        if snapshot is None:
            return
        self.query_one(Sparkline).data = list(self._speeds)
        for panel in PANELS:
            table = self.query_one(f"#{panel.name}", DataTable)
            rows, at = panel.rows(snapshot, self._order), table.scroll_offset.y
            shown = shown_columns(panel.columns, self.size.width)
            # New columns each time, since the terminal's width may have changed.
            table.clear(columns=True)
            for column in shown:
                table.add_column(_cell(Text(column.title, style="dim"), column.right))
            for row in rows:
                table.add_row(*(_cell(column.cell(row), column.right) for column in shown))
            table.scroll_to(y=at, animate=False)
            table.border_title = f"{panel.name}  {len(rows)}"

    def _head(self, snapshot: Snapshot | None) -> Text:
        if snapshot is None:
            return Text("sluice top")
        when = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
        parts = ["sluice top", ", ".join(snapshot.models), f"{snapshot.tokens_per_second:,.0f} tokens/s", when]
        head = Text(" · ".join(filter(None, parts)))
        head.append(f" · by {self._order}", style="dim")
        if self._paused:
            head.append(" · paused", style="bold yellow")
        return head

    @staticmethod
    def _table(panel: Panel) -> DataTable[Text]:
        table: DataTable[Text] = DataTable(id=panel.name, cursor_type="none", zebra_stripes=False)
        table.border_title = panel.name
        return table


def _cell(content: str | Text, right: bool) -> Text:
    text = Text(content) if isinstance(content, str) else content
    text.justify = "right" if right else "left"
    return text
