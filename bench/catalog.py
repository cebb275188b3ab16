"""The parts of the bench, and what belongs to each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure

from bench import plans, plots, sections, trouble
from bench.machine import Origin
from bench.parts import (
    chunked,
    deaths,
    host,
    overload,
    peers,
    policies,
    prefix,
    restart,
    retention,
    ring,
    scheduler,
    slow_reader,
)
from bench.rounds import Step
from bench.sections.words import Section


class Part(NamedTuple):
    """From how much is measured, over the result, to words and pictures."""

    plan: Callable[[bool, int, Path], Any]
    """(quick, threads, folder for model files) → the part's plan, which knows its number of `steps`."""
    measure: Callable[[Any, Path, Step], msgspec.Struct]
    """(plan, folder for logs, step) → the result."""
    result: type[msgspec.Struct]
    section: Callable[[Any], Section]
    draw: Callable[[Any], Figure]


PARTS: Mapping[str, Part] = {
    "ring": Part(plans.ring_plan, ring.measure, ring.Result, sections.of_ring, plots.of_ring),
    "policies": Part(plans.policies_plan, policies.measure, policies.Result, sections.of_policies, plots.of_policies),
    "chunked": Part(plans.chunked_plan, chunked.measure, chunked.Result, sections.of_chunked, plots.of_chunked),
    "scheduler": Part(
        plans.scheduler_plan, scheduler.measure, scheduler.Result, sections.of_scheduler, plots.of_scheduler
    ),
    "prefix": Part(plans.prefix_plan, prefix.measure, prefix.Result, sections.of_prefix, plots.of_prefix),
    "retention": Part(
        plans.retention_plan, retention.measure, retention.Result, sections.of_retention, plots.of_retention
    ),
    "host": Part(plans.host_plan, host.measure, host.Result, sections.of_host, plots.of_host),
    "peers": Part(plans.peers_plan, peers.measure, peers.Result, sections.of_peers, plots.of_peers),
    "deaths": Part(trouble.deaths_plan, deaths.measure, deaths.Result, sections.of_deaths, plots.of_deaths),
    "restart": Part(trouble.restart_plan, restart.measure, restart.Result, sections.of_restart, plots.of_restart),
    "overload": Part(trouble.overload_plan, overload.measure, overload.Result, sections.of_overload, plots.of_overload),
    "slow_reader": Part(
        trouble.slow_reader_plan,
        slow_reader.measure,
        slow_reader.Result,
        sections.of_slow_reader,
        plots.of_slow_reader,
    ),
    "soak": Part(trouble.soak_plan, deaths.measure, deaths.Result, sections.of_soak, plots.of_soak),
}


class Measured(msgspec.Struct, frozen=True):
    """A part's result and where it comes from. On disk, one JSON file per part."""

    origin: Origin
    result: Any


def save(folder: Path, name: str, measured: Measured) -> None:
    """Write <name>.json."""
    data = msgspec.json.format(msgspec.json.encode(measured), indent=1)
    (folder / f"{name}.json").write_bytes(data + b"\n")


def load(folder: Path) -> dict[str, Measured]:
    """Whatever parts are there, by name."""
    found = {}
    for name, part in PARTS.items():
        file = folder / f"{name}.json"
        if file.is_file():
            measured = msgspec.json.decode(file.read_bytes(), type=Measured)
            found[name] = Measured(measured.origin, msgspec.convert(measured.result, part.result))
    return found
