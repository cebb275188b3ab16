"""Findings as a picture; needs matplotlib."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.gpu.findings import Findings
from bench.gpu.measures import AS_SERVED, SLUICE
from bench.harness.style import BLUE, GREY, ORANGE, TEAL, canvas, frame, note
from bench.harness.tables import short

COLOURS = (BLUE, TEAL, ORANGE)


def draw(found: Findings) -> Figure:
    """Bandwidth and tokens by batch, and side by side."""
    subtitle = f"{found.origin['device']}, {found.origin['date']}"
    figure, grid = canvas((1, 3), (12.5, 4.0), "The GPU engine", subtitle)
    _bandwidth(grid[0][0], found)
    _tokens(grid[0][1], found)
    _peers(grid[0][2], found)
    return figure


def _bandwidth(axes: Axes, found: Findings) -> None:
    for colour, (name, batches) in zip(COLOURS, _series(found).items(), strict=False):
        values = [one / 1e9 for one in batches["bytes_per_second"]]
        axes.plot(batches["batch"], values, "o-", color=colour, label=name)
    if found.rates is not None:
        copy = found.rates.copy_bytes_per_second / 1e9
        axes.axhline(copy, color=GREY, linestyle="--")
        note(axes, f"copy: {short(copy)}", (1, copy), (0, 4), ha="left")
    axes.set_ylim(bottom=0)
    _by_batch(axes, "GB/s", "Memory read", "weights and KV cache per step, by its time")


def _tokens(axes: Axes, found: Findings) -> None:
    for colour, (name, batches) in zip(COLOURS, _series(found).items(), strict=False):
        axes.plot(batches["batch"], batches["tokens_per_second"], "o-", color=colour, label=name)
        for at, value in zip(batches["batch"], batches["tokens_per_second"], strict=True):
            note(axes, short(value), (at, value), (0, 5))
    axes.set_yscale("log")
    _by_batch(axes, "tokens/s", "Generation", "through the engine's loop")


def _by_batch(axes: Axes, unit: str, head: str, below: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequences")
    axes.set_ylabel(unit)
    axes.grid(axis="y")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    frame(axes, head, below, bare="")


def _peers(axes: Axes, found: Findings) -> None:
    rows = sorted(found.throughput, key=lambda one: (one.batch, -one.tokens_per_second))
    for row, one in enumerate(rows):
        axes.barh(row, one.tokens_per_second, 0.66, color=BLUE if one.system == SLUICE else GREY)
        note(axes, short(one.tokens_per_second), (one.tokens_per_second, row), (4, 0), ha="left", va="center")
    axes.set_yticks(range(len(rows)), [f"{one.system.partition(',')[0]}, {one.batch}" for one in rows])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.25)
    frame(axes, "Side by side", f"output tokens/s, {rows[0].shape}" if rows else "no system measured", bare="")


def _series(found: Findings) -> dict[str, dict[str, list[float]]]:
    """As served, by shape."""
    series: dict[str, dict[str, list[float]]] = {}
    for one in found.decode:
        if one.mode == AS_SERVED:
            entry = series.setdefault(one.shape, {"batch": [], "bytes_per_second": [], "tokens_per_second": []})
            for name, values in entry.items():
                values.append(getattr(one, name))
    return series
