"""python -m bench measures, writes JSON files, plots and a page, and prints a summary."""

import argparse
import sys
import tempfile
import time
import traceback
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__" and find_spec("matplotlib") is None:
    sys.exit("python -m bench needs the extra bench: pip install -e '.[router,detok,engine,bench]', or make bench")

from msgspec.structs import replace
from rich.console import Console

from bench.catalog import TOPICS
from bench.deaths.precisions import PRECISIONS
from bench.harness.origin import origin
from bench.harness.pool_files import OFF, ON
from bench.harness.topic import progress_lines
from bench.page import OUT, Measured, load, save, save_partial, show, write_page
from sluice.host.cores import usable_cores

WIDTH = 140
BY_PRECISION = {"deaths": "deaths_by_precision"}
"""Topics that measure in several precisions what others measure in one."""
KV = {OFF: (OFF,), ON: (ON,), "both": (OFF, ON)}


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    began = time.monotonic()
    chosen = {name: TOPICS[name] for name in _chosen(options)}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, progress_lines(console) as progress:
        for name, topic in chosen.items():
            plan = replace(topic.quick if options.quick else topic.plan, threads=options.threads)
            if options.precision and hasattr(plan, "precisions"):
                plan = replace(plan, precisions=tuple(options.precision))
            if options.kv and hasattr(plan, "kv"):
                plan = replace(plan, kv=KV[options.kv])
            if options.rounds is not None and hasattr(plan, "repeats"):
                plan = replace(plan, repeats=options.rounds)
            try:
                found = Measured(origin(arguments, options.threads), None)
                keep = partial(_keep, options.out, name, found)
                save(options.out, name, replace(found, result=topic.run(name, plan, Path(folder), progress, keep)))
            except Exception:  # noqa: BLE001 - the results of the other topics must still be written
                failed[name] = traceback.format_exc()
                progress.console.print(f"{name} failed", style="bold red")
    measured = load(options.out)
    write_page(options.out, measured)
    show(console, {name: measured[name] for name in chosen if name not in failed})
    for name, trace in failed.items():
        console.rule(f"[bold red]{name} failed")
        console.print(trace, markup=False, highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s; written to {options.out}")
    if failed:
        sys.exit(1)


def _keep(out: Path, name: str, found: Measured, result: Any) -> None:
    save_partial(out, name, replace(found, result=result))


def _chosen(options: argparse.Namespace) -> list[str]:
    """The topics to measure. With --precision, `deaths` is measured on a real model, in these precisions."""
    named = list(TOPICS) if "all" in options.parts else options.parts
    return [BY_PRECISION.get(name, name) if options.precision else name for name in named]


def _check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with an error rather than ignore an option."""
    plans = [TOPICS[name].plan for name in _chosen(options)]
    for option, field in (("precision", "precisions"), ("kv", "kv"), ("rounds", "repeats")):
        if getattr(options, option) is not None and not any(hasattr(plan, field) for plan in plans):
            parser.error(f"--{option}: has no effect on {', '.join(options.parts)}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures Sluice, topic by topic.")
    parser.add_argument("parts", nargs="*", default="all", choices=[*TOPICS, "all"], help="topics to measure")
    parser.add_argument("--quick", action="store_true", help="small sizes, only to test that it works")
    rounds = "rounds of each system, for topics that have rounds; default: the topic's plan"
    parser.add_argument("--rounds", type=int, help=rounds)
    precision = "a precision to measure, repeatable, for topics that have several; default: the topic's plan"
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS), help=precision)
    kv = "engines with pool files, without, or both in turns, for topics that compare them; default: the topic's plan"
    parser.add_argument("--kv", choices=list(KV), help=kv)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON files, plots and README.md")
    threads = "threads of each engine and peer; default: all cores"
    parser.add_argument("--threads", type=int, default=usable_cores(), help=threads)
    options = parser.parse_args(arguments)
    _check_options(options, parser)
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
