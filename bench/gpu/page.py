"""Findings as tables, for a terminal and for docs/measurements."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.gpu.findings import RUNS, Decode, Findings, Tried
from bench.gpu.measures import AS_SERVED, COPYING, EAGER, NOT_COPYING, SLUICE
from bench.gpu.shapes import LARGE, SMALL, SPARSE, quantized
from bench.harness import tables
from bench.harness.tables import Table, short

Rows = Iterable[Sequence[str]]
COPY_SHARE = 0.8
GRAPHS_FACTOR = 1.5
HIDDEN_SHARE = 0.8
COPYING_SHARE = 0.99
MANY = 64
"""Sequences that generate together, where quantized matrices are compared with dense ones."""


class Goal(NamedTuple):
    name: str
    least: float
    value: float
    form: str = ".0%"

    @property
    def wanted(self) -> str:
        return format(self.least, self.form)

    @property
    def found(self) -> str:
        return format(self.value, self.form)

    @property
    def met(self) -> bool:
        return self.value >= self.least


def goals(found: Findings) -> list[Goal]:
    """The goals for which both measurements exist."""
    made = []
    alone = {(one.shape, one.mode): one for one in found.decode if one.batch == 1}
    large = alone.get((LARGE.name, AS_SERVED))
    if large is not None and found.rates is not None:
        share = large.bytes_per_second / found.rates.copy_bytes_per_second
        made.append(Goal(f"{LARGE.name}, batch 1: share of the copy's bandwidth", COPY_SHARE, share))
    made += _quantized(found, alone)
    side_by_side = [one for one in found.throughput if (one.shape, one.batch) == (LARGE.name, 64)]
    rates = {one.system: one.tokens_per_second for one in side_by_side}
    ours = rates.pop(SLUICE, None)
    if ours is not None and rates:
        best = max(rates, key=lambda system: rates[system])
        made.append(Goal(f"{LARGE.name}, batch 64: speed / best peer, {best}", 1, ours / rates[best], ".2f"))
    graphs, eager = alone.get((SMALL.name, AS_SERVED)), alone.get((SMALL.name, EAGER))
    if graphs is not None and eager is not None:
        factor = eager.step_seconds / graphs.step_seconds
        made.append(Goal(f"{SMALL.name}, batch 1: speed / eager steps", GRAPHS_FACTOR, factor, ".2f"))
    uncopied = {(one.shape, one.batch): one.tokens_per_second for one in found.decode if one.mode == NOT_COPYING}
    for one in found.decode:
        if one.mode == COPYING and (rate := uncopied.get((one.shape, one.batch))):
            name = f"{one.shape}, batch {one.batch}: speed with copies of blocks to a file / without"
            made.append(Goal(name, COPYING_SHARE, one.tokens_per_second / rate, ".1%"))
    steps = [one for one in found.gaps if (one.shape, one.mode) == (SMALL.name, AS_SERVED)]
    idle = {(one.batch, one.overlap): one.idle_seconds for one in steps}
    for batch in sorted({batch for batch, _ in idle}):
        plain, ahead = idle.get((batch, False)), idle.get((batch, True))
        if plain and ahead is not None:
            name = f"{SMALL.name}, batch {batch}: share of the idle time hidden by overlap"
            made.append(Goal(name, HIDDEN_SHARE, 1 - ahead / plain))
    return made


def _quantized(found: Findings, alone: Mapping[tuple[str, str], Decode]) -> list[Goal]:
    """Of shapes whose matrices are quantized."""
    made = []
    for shape in quantized(LARGE):
        one = alone.get((shape.name, AS_SERVED))
        if one is not None and found.rates is not None:
            share = one.bytes_per_second / found.rates.copy_bytes_per_second
            made.append(Goal(f"{shape.name}, batch 1: share of the copy's bandwidth", COPY_SHARE, share))
    rates = {(one.shape, one.batch): one.tokens_per_second for one in found.decode if one.mode == AS_SERVED}
    for plain, batch in ((LARGE, MANY), (SPARSE, 1), (SPARSE, MANY)):
        for shape in quantized(plain):
            ours, theirs = rates.get((shape.name, batch)), rates.get((plain.name, batch))
            if ours is not None and theirs is not None:
                made.append(Goal(f"{shape.name}, batch {batch}: speed / bfloat16", 1, ours / theirs, ".2f"))
    return made


def tables_of(found: Findings) -> list[Table]:
    generation = "generation | batch | context | ms per step | tokens/s | GB/s | share of the copy"
    context = "context | prompts | tokens/s | TFLOP/s | share of the matrix product"
    joins = "a prompt joins | generating sequences | prompt tokens | step with the prompt, ms | other steps, ms"
    gaps = "steps | batch | µs per step | µs idle per step, profiled | longest, µs"
    kernels = "kernel, in a separate process | heads | result | first round, s | fastest round, ms"
    checks = [(one.name, "holds" if one.passed else "**DOES NOT HOLD**", one.detail) for one in found.checks]
    wanted = [(goal.name, goal.wanted, goal.found, "met" if goal.met else "missed") for goal in goals(found)]
    made = [
        _table("The machine", "property | value", found.facts.items()),
        _table("Goals", "goal | target | result | status", wanted),
        _table("The device", "property | value", _device(found)),
        _table("Kernels", kernels, map(_tried, found.tried)),
        _table("Checks", "check | result | details", checks),
        _table("Layers at fault", "check | layer, and the trials", found.blamed.items()),
        _table("Memory of the default path, GiB", "after | tensors | torch's | free", _memory(found)),
        _table("Generation, through the engine's loop", generation, _decode(found)),
        _table("Context, through the engine's loop", context, _context(found)),
        _table("Prompts that join, through the engine's loop", joins, _joins(found)),
        _table("Gaps between steps", gaps, _gaps(found)),
        _table("Side by side", "system | requests | tokens | output tokens/s | ratio to the best", _throughput(found)),
        _table("Skipped", "task | reason", ((name, _brief(why)) for name, why in found.skipped.items())),
        _table("Failed", "task | error", ((name, _last(trace)) for name, trace in found.failed.items())),
    ]
    return [table for table in made if table.rows]


def markdown(found: Findings) -> str:
    origin = "; ".join(f"{name} {value}" for name, value in found.origin.items() if name != "command")
    command = found.origin.get("command", "python -m bench.gpu")
    parts = [f"# The GPU engine, measured\n\n`{command}`: {origin}. Data: [gpu.json](gpu.json).", *found.notes]
    if found.doing:
        parts.append(f"Incomplete: *{found.doing}* was running when this was written.")
    if any(one.mode == AS_SERVED for one in found.decode) and not found.doing:
        parts.append("![Generation](gpu.png)")
    parts += [f"## {one.title}\n\n{tables.markdown(one, '---')}" for one in tables_of(found)]
    return "\n\n".join(parts) + "\n"


def _table(title: str, columns: str, rows: Rows) -> Table:
    """`rows` are lists of cells, because texts such as error messages may contain bars."""
    return Table([column.strip() for column in columns.split("|")], list(rows), title)


def _tried(one: Tried) -> Sequence[str]:
    ended = one.ended if one.absent or one.ended == RUNS else f"**{_brief(one.ended)}**"
    first, fastest = short(one.first) if one.first else "", short(one.fastest * 1e3) if one.fastest else ""
    return (one.kernel, one.place, ended, first, fastest)


def _memory(found: Findings) -> Rows:
    for one in found.memory:
        yield (one.phase, *(f"{size / (1 << 30):.2f}" for size in (one.allocated, one.reserved, one.free)))


def _device(found: Findings) -> Rows:
    if found.rates is not None:
        yield "copy, read and written", f"{short(found.rates.copy_bytes_per_second / 1e9)} GB/s"
        yield "matrix product", f"{short(found.rates.flops_per_second / 1e12)} TFLOP/s"
    for shape, choices in found.choices.items():
        yield f"engine, {shape}", ", ".join(f"{name} {value}" for name, value in choices.items())


def _decode(found: Findings) -> Rows:
    for one in found.decode:
        figures = map(short, (one.step_seconds * 1e3, one.tokens_per_second, one.bytes_per_second / 1e9))
        share = f"{one.bytes_per_second / found.rates.copy_bytes_per_second:.0%}" if found.rates else ""
        yield f"{one.shape}, {one.mode}", str(one.batch), str(one.context), *figures, share


def _context(found: Findings) -> Rows:
    for one in found.context:
        figures = map(short, (one.tokens_per_second, one.flops_per_second / 1e12))
        share = f"{one.flops_per_second / found.rates.flops_per_second:.0%}" if found.rates else ""
        yield one.shape, f"{one.prompts} × {one.prompt_tokens}", *figures, share


def _joins(found: Findings) -> Rows:
    for one in found.joins:
        seconds = (one.join_seconds, one.step_seconds)
        yield (
            f"{one.shape}, {one.mode}",
            str(one.batch),
            str(one.prompt_tokens),
            *(f"{each * 1e3:.2f}" for each in seconds),
        )


def _gaps(found: Findings) -> Rows:
    for one in found.gaps:
        name = f"{one.shape}, {one.mode}, {'overlap' if one.overlap else 'no overlap'}"
        seconds = (one.step_seconds, one.idle_seconds, one.longest_seconds)
        yield name, str(one.batch), *(short(value * 1e6) for value in seconds)


def _throughput(found: Findings) -> Rows:
    best: dict[tuple[str, int], float] = {}
    for one in found.throughput:
        best[one.shape, one.batch] = max(best.get((one.shape, one.batch), 0.0), one.tokens_per_second)
    for one in sorted(found.throughput, key=lambda one: (one.shape, one.batch)):
        share = one.tokens_per_second / best[one.shape, one.batch]
        tokens = f"{one.prompt_tokens} in, {one.output_tokens} out"
        yield f"{one.shape}, {one.system}", str(one.batch), tokens, short(one.tokens_per_second), f"{share:.2f}"


def _brief(why: str) -> str:
    return " ".join(why.split())[:300]


def _last(trace: str) -> str:
    return _brief(trace.strip().splitlines()[-1])
