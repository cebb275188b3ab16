"""Results on disk, the page under docs/measurements, and the summary on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markdown import Markdown

from bench.catalog import TOPICS
from bench.harness.origin import Origin
from bench.harness.tables import markdown, plural

OUT = Path(__file__).parents[1] / "docs" / "measurements"
INTRODUCTION = """# Measurements

Results of `make bench`; `make bench PARTS="cache policies"` runs some of the topics. The figures of a table come from
one run in which the systems took turns; each figure is the median of several rounds, and ratios are medians of the
ratios of the rounds. Client, router, detokenizers and engine share the cores of one machine, so CPU time per token
tells more about the cost of each part than wall-clock time. Topics about scheduling and the cache run the engine in
process, without the ring, unless they say otherwise.
"""
ON_GPUS = """All figures are from CPUs. [gpu.md](gpu.md) has the results of `python -m bench.gpu` on a GPU.
"""
NO_GPU = """All figures are from CPUs. `python -m bench.gpu` measures [on a GPU](../gpu.md#check-and-measure);
no such results are committed yet.
"""


class Measured(msgspec.Struct, frozen=True):
    """A topic's result and its origin. Stored as one JSON file per topic."""

    origin: Origin
    result: Any


def save(folder: Path, name: str, measured: Measured) -> None:
    (folder / f"{name}.json").write_bytes(_json(measured))
    _partial(folder, name).unlink(missing_ok=True)
    TOPICS[name].draw(measured.result).savefig(folder / f"{name}.png")


def save_partial(folder: Path, name: str, measured: Measured) -> None:
    """An unfinished result. It is not part of the page, and `save` deletes it."""
    _partial(folder, name).write_bytes(_json(measured))


def _partial(folder: Path, name: str) -> Path:
    return folder / f"{name}.partial"


def _json(measured: Measured) -> bytes:
    return msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n"


def load(folder: Path) -> dict[str, Measured]:
    found = {}
    for name, topic in TOPICS.items():
        file = folder / f"{name}.json"
        if file.is_file():
            measured = msgspec.json.decode(file.read_bytes(), type=Measured)
            found[name] = Measured(measured.origin, msgspec.convert(measured.result, topic.result))
    return found


def write_page(folder: Path, measured: Mapping[str, Measured]) -> None:
    parts = [_markdown(name, found) for name, found in measured.items()]
    gpus = ON_GPUS if (folder / "gpu.md").is_file() else NO_GPU
    (folder / "README.md").write_text("\n".join([INTRODUCTION, gpus, *parts]), encoding="utf-8")


def show(console: Console, measured: Mapping[str, Measured]) -> None:
    for name, found in measured.items():
        section = TOPICS[name].section(found.result)
        console.rule(f"[bold]{section.title}")
        console.print(Markdown("\n\n".join([*map(markdown, section.tables), _list(section.answers)])))


def _markdown(name: str, found: Measured) -> str:
    section = TOPICS[name].section(found.result)
    origin = found.origin
    answers = _list(section.answers)
    tables = "\n\n".join(markdown(table) for table in section.tables)
    return (
        f"## {section.title}\n\n{section.question}\n\n{answers}\n\n![{section.title}]({name}.png)\n\n{tables}\n\n"
        f"`{origin.command}` on {origin.date}, {plural(origin.threads, 'thread')} for each "
        f"engine and peer, {origin.machine}; {origin.software}. Data: [{name}.json]({name}.json).\n"
    )


def _list(answers: Sequence[str]) -> str:
    return "\n".join(f"- {answer}" for answer in answers)
