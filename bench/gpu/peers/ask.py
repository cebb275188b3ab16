"""Measures a peer in its own process."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.children import Children
from bench.gpu.findings import Skip, Throughput
from bench.gpu.peers.child import MARK
from bench.gpu.peers.systems import PeerKind
from bench.gpu.shapes import Shape, Workload


def measure_peer(
    kind: PeerKind,
    shape: Shape,
    folder: Path,
    device: torch.device,
    works: Sequence[Workload],
    children: Children,
    seconds: float,
) -> tuple[list[Throughput], str]:
    """Results within `seconds`, and why some are missing. Raises Skip if it is not installed or not meant for this
    device."""
    if find_spec(kind.package) is None:
        raise Skip("not installed")
    if device.type == "cpu" and not kind.cpu:
        raise Skip("not asked on a CPU")
    command = _command(kind, shape, folder, device, works)
    output, why = children.run(command, folder / f"{kind.package}.log", seconds)
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    times = {line["batch"]: line["seconds"] for line in lines}
    return [work.result(kind.name, shape.name, times[work.batch]) for work in works if work.batch in times], why


def _command(kind: PeerKind, shape: Shape, folder: Path, device: torch.device, works: Sequence[Workload]) -> list[str]:
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
    return [sys.executable, "-m", "bench.gpu.peers.child", kind.package, *flags, "--batches", *batches]
