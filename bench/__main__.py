"""python -m bench: measure, write JSON, plots and a page, and print a summary."""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.catalog import PARTS, Measured, load, save
from bench.machine import origin
from bench.report import OUT
from sluice.ring.cores import usable_cores

WIDTH = 140
"""Of what is printed where there is no terminal."""


def main(arguments: list[str]) -> None:
    """Run the parts that were asked for, one after the other."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    began = time.monotonic()
    names = list(PARTS) if "all" in options.parts else [name for name in PARTS if name in options.parts]
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Progress(*columns, console=console) as progress:
        for name in names:
            try:
                result = _measure(name, options, Path(folder), progress)
                save(options.out, name, Measured(origin(arguments, options.threads), result))
                PARTS[name].draw(result).savefig(options.out / f"{name}.png")
            except Exception:  # noqa: BLE001 - what the other parts found is still to be written down
                failed[name] = traceback.format_exc()
                progress.console.print(f"{name} failed", style="bold red")
    measured = load(options.out)
    report.write_page(options.out, measured)
    report.show(console, {name: measured[name] for name in names if name not in failed})
    for name, trace in failed.items():
        console.rule(f"[bold red]{name} failed")
        console.print(trace, markup=False, highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s; written to {options.out}")
    if failed:
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures the parts and the whole.")
    parser.add_argument("parts", nargs="*", default="all", choices=[*PARTS, "all"], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="only see whether it works")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON files, plots and README.md")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="of each engine and peer; default: all cores"
    )
    return parser.parse_args(arguments)


def _measure(name: str, options: argparse.Namespace, folder: Path, progress: Progress) -> msgspec.Struct:
    part = PARTS[name]
    plan = part.plan(options.quick, options.threads, folder)
    task = progress.add_task(f"{name}: starting", total=plan.steps)

    def step(done: str) -> None:
        progress.update(task, advance=1, description=f"{name}: {done}")

    result = part.measure(plan, folder, step)
    progress.update(task, description=name)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
