"""The page under docs/measurements, and the summary on the terminal."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table as RichTable

from bench.catalog import PARTS, Measured
from bench.sections.words import Table

OUT = Path(__file__).parents[1] / "docs" / "measurements"
INTRODUCTION = """# Measurements

What `make bench` found; `make bench PARTS="policies host"` is some of it. Figures of one table come from one run, in
which the systems took turns; each is the median of several rounds, and ratios are medians of the rounds' own ratios.
Client, router, detokenizers and engine share the cores of one machine, so CPU time per token says more about what each
part costs than the clock does. Where it is about scheduling and the cache, the engine is driven in process, without the
ring.
"""
ON_GPUS = """All of it is from CPUs. [gpu.md](gpu.md) has what `python -m bench.gpu` found on a GPU.
"""
NO_GPU = """All of it is from CPUs. `python -m bench.gpu` checks and measures [on a GPU](../gpu.md#check-and-measure),
but none has come to hand, so nothing of that is committed yet. What the docs say of GPUs is tested with fakes, what
they say of several with gloo; NCCL runs by the same code and is unproven.
"""


def write_page(folder: Path, measured: Mapping[str, Measured]) -> None:
    """README.md, from every part that was measured."""
    parts = [_markdown(name, found) for name, found in measured.items()]
    gpus = ON_GPUS if (folder / "gpu.md").is_file() else NO_GPU
    (folder / "README.md").write_text("\n".join([INTRODUCTION, gpus, *parts]), encoding="utf-8")


def show(console: Console, measured: Mapping[str, Measured]) -> None:
    """Answers and tables."""
    for name, found in measured.items():
        section = PARTS[name].section(found.result)
        console.rule(f"[bold]{section.title}")
        for table in section.tables:
            console.print(_for_terminal(table))
        for answer in section.answers:
            console.print(Markdown(answer))


def _markdown(name: str, found: Measured) -> str:
    section = PARTS[name].section(found.result)
    origin = found.origin
    answers = "\n".join(f"- {answer}" for answer in section.answers)
    tables = "\n\n".join(_table(table) for table in section.tables)
    return (
        f"## {section.title}\n\n{section.question}\n\n{answers}\n\n![{section.title}]({name}.png)\n\n{tables}\n\n"
        f"`{origin.command}` on {origin.date}, {origin.threads} thread{'s' if origin.threads > 1 else ''} for each "
        f"engine and peer, {origin.machine}; {origin.software}. Data: [{name}.json]({name}.json).\n"
    )


def _table(table: Table) -> str:
    lines = [table.columns, ["---", *["---:" for _ in table.columns[1:]]], *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _for_terminal(table: Table) -> RichTable:
    shown = RichTable(header_style="bold")
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*(cell.replace("**", "") for cell in row))
    return shown
