"""Ask a peer, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.findings import Skip, Throughput
from bench.gpu.peers.catalog import Entry
from bench.gpu.peers.child import MARK
from bench.gpu.shapes import Shape
from bench.gpu.workload import Workload

ROOT = Path(__file__).parents[3]
LAST_CHARS = 1500


def ask(
    entry: Entry, shape: Shape, folder: Path, device: torch.device, works: Sequence[Workload], seconds: float
) -> tuple[list[Throughput], str]:
    """What it managed in so many seconds, and why that is not everything; "" where it is.

    Raises Skip where it is not installed or is not for this device.
    """
    if find_spec(entry.package) is None:
        raise Skip("not installed")
    if device.type == "cpu" and not entry.cpu:
        raise Skip("not asked on a CPU")
    output, why = _run(_command(entry, shape, folder, device, works), folder / f"{entry.package}.log", seconds)
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


def _run(command: list[str], log: Path, seconds: float) -> tuple[str, str]:
    """Standard output, and how it ended; "" where well."""
    with log.open("wb") as errors:
        # A session of its own: some peers start processes, which have to end with it.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds))
            ended = "" if process.returncode == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            ended = f"not through after {seconds:.0f} s"
        finally:
            _kill(process)
    said = log.read_text(errors="replace")[-LAST_CHARS:]
    return output, f"{ended}: {said}" if ended else ""


def _kill(process: "subprocess.Popen[str]") -> None:
    """It and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
