"""The panels of `sluice top`: their columns, and the order of their rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from sluice.top.snapshot import DetokenizerRow, EngineRow, RequestRow, RouterRow, Snapshot

ORDERS = ("name", "load", "speed")
"""Orders of the rows. The key `s` switches to the next one."""
STYLES = {
    "serving": "green", "draining": "yellow", "stalled": "red", "unreachable": "red", "lost": "red",
    "no answer": "red", "unknown": "yellow", "on_ring": "cyan", "recovering": "yellow", "paused": "yellow",
}  # fmt: skip
BAR_CELLS = 10
WIDE = 118
"""Width from which all columns are shown. The others fit 80 columns."""
FINGERPRINT_CHARACTERS = 8
"""Characters of a fingerprint that are shown: enough to distinguish the few models of a ring."""
WITHOUT_NUMBERS = ("lost", "unknown", "no answer")
"""States in which a peer's numbers are outdated or missing."""


class Column(NamedTuple):
    title: str
    cell: Callable[[Any], str | Text]
    right: bool = True
    wide: bool = False
    """Whether it is shown only in terminals of at least WIDE columns."""


def shown_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that are shown in a terminal of this width."""
    return [column for column in columns if width >= WIDE or not column.wide]


def table(columns: Sequence[Column], rows: Iterable[Any]) -> Table:
    filled = Table(box=SIMPLE)
    for column in columns:
        filled.add_column(column.title, justify="right" if column.right else "left")
    for row in rows:
        filled.add_row(*(column.cell(row) for column in columns))
    return filled


class Panel(NamedTuple):
    name: str
    """Also the name of the field of `Snapshot` that holds the rows."""
    columns: tuple[Column, ...]
    keys: Mapping[str, Callable[[Any], Any]]
    """Sort key of the rows, by order. For the rest of ORDERS, the rows stay in the order of the snapshot."""

    def rows(self, snapshot: Snapshot, order: str) -> Sequence[Any]:
        """The rows, sorted by one of ORDERS."""
        rows: Sequence[Any] = getattr(snapshot, self.name)
        return sorted(rows, key=self.keys[order]) if order in self.keys else rows


def state(row: EngineRow | DetokenizerRow | RouterRow | RequestRow) -> Text:
    return Text(row.state.replace("_", " "), style=STYLES.get(row.state, ""))


def engine_state(row: EngineRow) -> Text:
    """The state, and the phase of an engine that does not compute whole requests."""
    return Text.assemble(state(row), " ", (row.phase, "dim")) if row.phase else state(row)


def bar(fraction: float) -> Text:
    full = round(BAR_CELLS * min(fraction, 1.0))
    return Text.assemble(("━" * full, "cyan"), ("━" * (BAR_CELLS - full), "bright_black"), f" {fraction:4.0%}")


def model(row: EngineRow) -> Text:
    """The model's name, and its version label or the beginning of its fingerprint."""
    exact = row.model_version or row.model_fingerprint[:FINGERPRINT_CHARACTERS]
    return Text.assemble(row.model, " ", (exact, "dim")) if exact else Text(row.model)


def seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def _number(cell: Callable[[Any], str | Text]) -> Callable[[Any], str | Text]:
    """A cell with a number of a peer: a dash if the number is outdated or missing."""
    return lambda row: "–" if row.state in WITHOUT_NUMBERS else cell(row)


def _first_token(row: RequestRow) -> str:
    return "–" if row.first_token_seconds is None else seconds(row.first_token_seconds)


ENGINES = Panel(
    "engines",
    (
        Column("engine", lambda row: Text(row.id), right=False),
        Column("state", engine_state, right=False),
        Column("requests", _number(lambda row: str(row.active)), wide=True),
        Column("batch", _number(lambda row: f"{row.batch} of {row.max_batch}")),
        Column("queued", _number(lambda row: str(row.queued))),
        Column("paused", _number(lambda row: str(row.paused))),
        Column("KV cache", _number(lambda row: bar(row.kv_fraction))),
        Column("reuse", _number(lambda row: f"{row.reuse:.0%}"), wide=True),
        Column("step", _number(lambda row: seconds(row.step_seconds)), wide=True),
        Column("tokens/s", _number(lambda row: f"{row.tokens_per_second:,.0f}")),
        Column("model", model, right=False, wide=True),
        Column("version", lambda row: Text(row.version), right=False, wide=True),
    ),
    {"load": lambda row: -row.active, "speed": lambda row: -row.tokens_per_second},
)
DETOKENIZERS = Panel(
    "detokenizers",
    (
        Column("detokenizer", lambda row: Text(row.id), right=False),
        Column("state", state, right=False),
        Column("streams", _number(lambda row: f"{row.streams:,}")),
        Column("queue", _number(lambda row: f"{row.queue:,}")),
        Column("tokens/s", _number(lambda row: f"{row.tokens_per_second:,.0f}")),
    ),
    {"load": lambda row: -row.streams, "speed": lambda row: -row.tokens_per_second},
)
ROUTERS = Panel(
    "routers",
    (
        Column("router", lambda row: Text(row.id or row.address), right=False),
        Column("state", state, right=False),
        Column("open", _number(lambda row: f"{row.open:,}")),
        Column("waiting", _number(lambda row: f"{row.waiting:,}")),
        Column("admitted", _number(lambda row: f"{row.admitted:,} of {row.max_admitted:,}")),
        Column("recoveries", _number(lambda row: f"{row.recoveries:,}")),
    ),
    {"load": lambda row: -row.open, "speed": lambda row: -row.open},
)
TENANTS = Panel(
    "tenants",
    (
        Column("tenant", lambda row: Text(row.tenant or "none"), right=False),
        Column("open", lambda row: f"{row.open:,}"),
        Column("waiting", lambda row: f"{row.waiting:,}"),
        Column("admitted", lambda row: f"{row.admitted:,}"),
    ),
    {"name": lambda row: row.tenant},
)
REQUESTS = Panel(
    "requests",
    (
        Column("request", lambda row: Text(row.id), right=False),
        Column("state", state, right=False),
        Column("tenant", lambda row: Text(row.tenant), right=False, wide=True),
        Column("for", lambda row: seconds(row.seconds)),
        Column("first token", _first_token, wide=True),
        Column("prompt", lambda row: f"{row.prompt_tokens:,}", wide=True),
        Column("cached", lambda row: f"{row.cached_tokens:,}", wide=True),
        Column("tokens", lambda row: f"{row.completion_tokens:,}"),
        Column("tokens/s", lambda row: f"{row.tokens_per_second:,.0f}"),
        Column("attempts", lambda row: str(row.attempts), wide=True),
        Column("engine", lambda row: Text(row.engine), right=False, wide=True),
        Column("detokenizer", lambda row: Text(row.detokenizer), right=False, wide=True),
    ),
    # In the order "name", the newest come first, as in the snapshot.
    {"load": lambda row: -row.seconds, "speed": lambda row: -row.completion_tokens},
)
PANELS = (ENGINES, DETOKENIZERS, ROUTERS, TENANTS, REQUESTS)
