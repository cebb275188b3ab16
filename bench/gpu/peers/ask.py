"""Ask a peer, in a process of its own."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.children import Children
from bench.gpu.findings import Skip, Throughput
from bench.gpu.peers.catalog import Entry
from bench.gpu.peers.child import MARK
from bench.gpu.shapes import Shape
from bench.gpu.workload import Workload


def ask(
    entry: Entry,
    shape: Shape,
    folder: Path,
    device: torch.device,
    works: Sequence[Workload],
    children: Children,
    seconds: float,
) -> tuple[list[Throughput], str]:
    """What it managed in so many seconds, and why that is not everything; "" where it is.

    Raises Skip where it is not installed or is not for this device.
    """
    if find_spec(entry.package) is None:
        raise Skip("not installed")
    if device.type == "cpu" and not entry.cpu:
        raise Skip("not asked on a CPU")
    command = _command(entry, shape, folder, device, works)
    output, why = children.run(command, folder / f"{entry.package}.log", seconds)
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    times = {line["batch"]: line["seconds"] for line in lines}
    return [work.result(entry.name, shape.name, times[work.batch]) for work in works if work.batch in times], why


def _command(entry: Entry, shape: Shape, folder: Path, device: torch.device, works: Sequence[Workload]) -> list[str]:
    largest = max(works, key=lambda work: work.prompt_tokens + work.output_tokens)
    values = {
        "model": shape.write(folder),
        "device": device.type,
        "vocab": shape.vocab_size,
        "prompt": largest.prompt_tokens,
        "output": largest.output_tokens,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    batches = [str(work.batch) for work in works]
    return [sys.executable, "-m", "bench.gpu.peers.child", entry.package, *flags, "--batches", *batches]
