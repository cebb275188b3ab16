"""Findings as a picture; needs matplotlib."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.gpu.findings import Findings
from bench.gpu.measures import AS_SERVED, SLUICE
from bench.harness.style import BLUE, GREY, ORANGE, TEAL, Series, canvas, frame, lines, note, ranks
from bench.harness.tables import short


def draw(found: Findings) -> Figure:
    subtitle = f"{found.origin['device']}, {found.origin['date']}"
    figure, ((bandwidth, tokens, peers),) = canvas((1, 3), (14, 4.0), "The GPU engine", subtitle)
    _by_batch(bandwidth, found, "bytes_per_second", 1e9)
    if found.rates is not None:
        copy = found.rates.copy_bytes_per_second / 1e9
        bandwidth.axhline(copy, color=GREY, linestyle="--")
        note(bandwidth, f"copy: {short(copy)}", (1, copy), (0, 4), ha="left")
    frame(bandwidth, "Memory read, GB/s", "weights and KV cache per step, by its time", x="sequences", grid="y")
    _by_batch(tokens, found, "tokens_per_second", 1)
    tokens.set_yscale("log")
    frame(tokens, "Generation, tokens/s", "through the engine's loop", x="sequences", grid="y")
    rows = sorted(found.throughput, key=lambda one: (one.batch, -one.tokens_per_second))
    names = [f"{one.system.partition(',')[0]}, {one.batch}" for one in rows]
    rates = [one.tokens_per_second for one in rows]
    ranks(peers, names, rates, [BLUE if one.system == SLUICE else GREY for one in rows], list(map(short, rates)))
    frame(peers, "Side by side", f"output tokens/s, {rows[0].shape}" if rows else "no system measured", bare="bottom")
    return figure


def _by_batch(axes: Axes, found: Findings, what: str, unit: float) -> None:
    served = [one for one in found.decode if one.mode == AS_SERVED]
    batches = sorted({one.batch for one in served})
    axes.set_xscale("log", base=2)
    series = []
    for shape, colour in zip(dict.fromkeys(one.shape for one in served), (BLUE, TEAL, ORANGE), strict=False):
        values = {one.batch: getattr(one, what) / unit for one in served if one.shape == shape}
        series.append(Series(shape, colour, [values.get(batch, float("nan")) for batch in batches]))
    lines(axes, batches, series)
