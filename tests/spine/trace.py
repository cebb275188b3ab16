"""What a plain request enters: files, functions and lines of the services."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx

from sluice.launch import Ring
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes.ports import free_ports
from tests.spine.tracer import FOLDER, PHASE

TRACER = (sys.executable, "-P", str(Path(__file__).with_name("tracer.py")))
LIMIT_SECONDS = 10.0
IDLE_SECONDS = 4.0
"""Longer than the periods of heartbeats and statistics."""
SETTLE_SECONDS = 1.0
"""After which a busy machine too has written the last log line of a request."""
SEEN_SECONDS = 0.2
"""After which all services have seen a new phase."""
ROUNDS = 3
MAX_TOKENS = 16
KV_TOKENS = 8192
SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""What a plain request sets."""
Function = tuple[str, str, int]
"""File, qualified name and first line."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What ran of a function."""

    lines: frozenset[int]
    size: int
    """Lines of its source, with the signature, docstring and comments."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a request enters."""

    files: list[str]
    functions: int
    executed_lines: int
    source_lines: int
    """Of these functions, as a reader who follows the request sees them."""


class Tracing:
    """Names the phases of traced services, and reads what they record."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._folder = folder
        self._processes = processes
        self._idle = self._during("idle", lambda: time.sleep(IDLE_SECONDS))

    def way(self, name: str, send: Callable[[str], object]) -> Way:
        """What each of several requests enters that does not also run while the services are idle.

        `send` sends a request with this prompt. The prompts begin differently, so that no blocks are reused.
        """
        rounds = [
            self._during(f"{name}-{i}", lambda prompt=f"def area_{i}(x): return": send(prompt)) for i in range(ROUNDS)
        ]
        common = set.intersection(*(set(visits) for visits in rounds)).difference(self._idle)
        visits = {function: rounds[0][function] for function in common}
        return Way(
            files=sorted({file for file, _, _ in visits}),
            functions=len(visits),
            executed_lines=sum(len(visit.lines) for visit in visits.values()),
            source_lines=sum(visit.size for visit in visits.values()),
        )

    def _during(self, phase: str, work: Callable[[], object]) -> dict[Function, Visit]:
        self._set(phase)
        work()
        self._set("")
        return self._read(phase)

    def _set(self, phase: str) -> None:
        new = self._folder / "new"
        new.write_text(phase)
        new.rename(self._folder / PHASE)
        time.sleep(SEEN_SECONDS)

    def _read(self, phase: str) -> dict[Function, Visit]:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(files := list(self._folder.glob(f"{phase}.*.json"))) < self._processes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(files)} of {self._processes} services have written {phase}")
            time.sleep(0.05)
        visits: dict[Function, Visit] = {}
        for file in files:
            for entry in json.loads(file.read_text()):
                function = entry["file"], entry["name"], entry["first_line"]
                before = visits[function].lines if function in visits else frozenset()
                visits[function] = Visit(before.union(entry["lines"]), entry["size"])
        return visits


@contextmanager
def traced_ring() -> Iterator[tuple[Ring, Tracing]]:
    """A ring with a gateway, whose services record what they run."""
    with TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            with Ring(
                python=TRACER,
                detokenizers=1,
                port=free_ports(1),
                http_port=free_ports(1),
                # Not by the free memory: no block is evicted, on whatever machine.
                engine_args={"kv_cache_tokens": KV_TOKENS},
            ) as ring:
                # What runs only once in a service is no part of a request's way.
                grpc_sender(ring)("def warm(up):")
                http_sender(ring)("def warm(up, again):")
                time.sleep(SETTLE_SECONDS)
                yield ring, Tracing(Path(folder), len(ring.pids))
        finally:
            del os.environ[FOLDER]


def ways() -> dict[str, Way]:
    """The way of a plain streamed request, by gRPC and over HTTP."""
    with traced_ring() as (ring, tracing):
        return {
            "gRPC": tracing.way("grpc", grpc_sender(ring)),
            "HTTP": tracing.way("http", http_sender(ring)),
        }


def grpc_sender(ring: Ring) -> Callable[[str], object]:
    def send(prompt: str) -> None:
        spec = pb.GenerationSpec(
            text=prompt,
            stopping=sampling_pb2.StoppingCriteria(max_tokens=MAX_TOKENS),
            sampling=sampling_pb2.SamplingParams(**SAMPLING),
        )
        with grpc.insecure_channel(ring.address) as channel:
            list(GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=spec)))

    return send


def http_sender(ring: Ring) -> Callable[[str], object]:
    def send(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, **SAMPLING}
        answer = httpx.post(f"http://{ring.http_address}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()

    return send
