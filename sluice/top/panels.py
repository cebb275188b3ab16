"""The panels of `sluice top`: which columns they have, and in which order their rows come."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from sluice.top.snapshot import DetokenizerRow, EngineRow, RequestRow, RouterRow, Snapshot, TenantRow

ORDERS = ("name", "load", "speed")
"""`s` goes from one to the next."""
STYLES = {
    "serving": "green", "draining": "yellow", "stalled": "red", "unreachable": "red", "lost": "red",
    "no answer": "red", "unknown": "yellow", "on_ring": "cyan", "recovering": "yellow", "paused": "yellow",
}  # fmt: skip
BAR_CELLS = 10
FINGERPRINT_CHARACTERS = 8
"""Enough to tell apart the few models of a ring."""
GONE = ("lost", "unknown", "no answer")


class Column(NamedTuple):
    title: str
    cell: Callable[[Any], str | Text]
    right: bool = True


class Panel(NamedTuple):
    name: str
    columns: tuple[Column, ...]
    rows: Callable[[Snapshot, str], Sequence[Any]]
    """In an order of ORDERS."""


def state(row: EngineRow | DetokenizerRow | RouterRow | RequestRow) -> Text:
    return Text(row.state.replace("_", " "), style=STYLES.get(row.state, ""))


def bar(part: float) -> Text:
    full = round(BAR_CELLS * min(part, 1.0))
    return Text.assemble(("━" * full, "cyan"), ("━" * (BAR_CELLS - full), "bright_black"), f" {part:4.0%}")


def model(row: EngineRow) -> Text:
    """Its name, and what tells it from others of that name."""
    exact = row.model_version or row.model_fingerprint[:FINGERPRINT_CHARACTERS]
    return Text.assemble(row.model, " ", (exact, "dim")) if exact else Text(row.model)


def seconds(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def _heard(cell: Callable[[Any], str | Text]) -> Callable[[Any], str | Text]:
    """Of a peer that says nothing any more, its last numbers would be untrue."""
    return lambda row: "–" if row.state in GONE else cell(row)


def _engines(found: Snapshot, order: str) -> Sequence[EngineRow]:
    by = {"load": lambda row: -row.active, "speed": lambda row: -row.tokens_per_second}
    return sorted(found.engines, key=by[order]) if order in by else found.engines


def _detokenizers(found: Snapshot, order: str) -> Sequence[DetokenizerRow]:
    by = {"load": lambda row: -row.streams, "speed": lambda row: -row.tokens_per_second}
    return sorted(found.detokenizers, key=by[order]) if order in by else found.detokenizers


def _routers(found: Snapshot, order: str) -> Sequence[RouterRow]:
    return found.routers if order == "name" else sorted(found.routers, key=lambda row: -row.open)


def _tenants(found: Snapshot, order: str) -> Sequence[TenantRow]:
    return found.tenants if order != "name" else sorted(found.tenants, key=lambda row: row.tenant)


def _requests(found: Snapshot, order: str) -> Sequence[RequestRow]:
    """By name: the newest first."""
    by = {"load": lambda row: -row.seconds, "speed": lambda row: -row.completion_tokens}
    return sorted(found.requests, key=by[order]) if order in by else found.requests


ENGINES = Panel(
    "engines",
    (
        Column("engine", lambda row: Text(row.id), right=False),
        Column("state", state, right=False),
        Column("requests", _heard(lambda row: f"{row.active} of {row.max_active}")),
        Column("queued", _heard(lambda row: str(row.queued))),
        Column("paused", _heard(lambda row: str(row.paused))),
        Column("KV cache", _heard(lambda row: bar(row.kv_part))),
        Column("reuse", _heard(lambda row: f"{row.reuse:.0%}")),
        Column("step", _heard(lambda row: seconds(row.step_seconds))),
        Column("tokens/s", _heard(lambda row: f"{row.tokens_per_second:,.0f}")),
        Column("model", model, right=False),
        Column("version", lambda row: Text(row.version), right=False),
    ),
    _engines,
)
DETOKENIZERS = Panel(
    "detokenizers",
    (
        Column("detokenizer", lambda row: Text(row.id), right=False),
        Column("state", state, right=False),
        Column("streams", _heard(lambda row: f"{row.streams:,}")),
        Column("queue", _heard(lambda row: f"{row.queue:,}")),
        Column("tokens/s", _heard(lambda row: f"{row.tokens_per_second:,.0f}")),
    ),
    _detokenizers,
)
ROUTERS = Panel(
    "routers",
    (
        Column("router", lambda row: Text(row.id or row.address), right=False),
        Column("state", state, right=False),
        Column("open", _heard(lambda row: f"{row.open:,}")),
        Column("waiting", _heard(lambda row: f"{row.waiting:,}")),
        Column("admitted", _heard(lambda row: f"{row.admitted:,} of {row.max_admitted:,}")),
        Column("recoveries", _heard(lambda row: f"{row.recoveries:,}")),
    ),
    _routers,
)
TENANTS = Panel(
    "tenants",
    (
        Column("tenant", lambda row: Text(row.tenant or "none"), right=False),
        Column("open", lambda row: f"{row.open:,}"),
        Column("waiting", lambda row: f"{row.waiting:,}"),
        Column("admitted", lambda row: f"{row.admitted:,}"),
    ),
    _tenants,
)
REQUESTS = Panel(
    "requests",
    (
        Column("request", lambda row: Text(row.id), right=False),
        Column("state", state, right=False),
        Column("tenant", lambda row: Text(row.tenant), right=False),
        Column("for", lambda row: seconds(row.seconds)),
        Column("prompt", lambda row: f"{row.prompt_tokens:,}"),
        Column("cached", lambda row: f"{row.cached_tokens:,}"),
        Column("tokens", lambda row: f"{row.completion_tokens:,}"),
        Column("attempts", lambda row: str(row.attempts)),
        Column("engine", lambda row: Text(row.engine), right=False),
        Column("detokenizer", lambda row: Text(row.detokenizer), right=False),
    ),
    _requests,
)
PANELS = (ENGINES, DETOKENIZERS, ROUTERS, TENANTS, REQUESTS)
