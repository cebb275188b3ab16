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

from bench.catalog import TOPICS
from bench.harness.origin import origin
from bench.page import OUT, Measured, load, save, show, write_page
from sluice.ring.cores import usable_cores

WIDTH = 140


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    began = time.monotonic()
    names = list(TOPICS) if "all" in options.parts else [name for name in TOPICS if name in options.parts]
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Progress(*columns, console=console) as progress:
        for name in names:
            try:
                result = _measure(name, options, Path(folder), progress)
                save(options.out, name, Measured(origin(arguments, options.threads), result))
            except Exception:  # noqa: BLE001 - the results of the other topics must still be written
                failed[name] = traceback.format_exc()
                progress.console.print(f"{name} failed", style="bold red")
    measured = load(options.out)
    write_page(options.out, measured)
    show(console, {name: measured[name] for name in names if name not in failed})
    for name, trace in failed.items():
        console.rule(f"[bold red]{name} failed")
        console.print(trace, markup=False, highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s; written to {options.out}")
    if failed:
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures the parts and the whole.")
    parser.add_argument("parts", nargs="*", default="all", choices=[*TOPICS, "all"], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="small sizes, only to see whether it works")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON files, plots and README.md")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="of each engine and peer; default: all cores"
    )
    return parser.parse_args(arguments)


def _measure(name: str, options: argparse.Namespace, folder: Path, progress: Progress) -> msgspec.Struct:
    plan = TOPICS[name].plan(options.quick, options.threads, folder)
    task = progress.add_task(f"{name}: starting", total=plan.steps)

    def step(done: str) -> None:
        progress.update(task, advance=1, description=f"{name}: {done}")

    result = TOPICS[name].measure(plan, folder, step)
    progress.update(task, description=name)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
