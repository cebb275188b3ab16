"""The systems of a comparison, each in a separate process: Sluice with several settings, transformers, and peers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.children import SystemProcess
from bench.harness.load import Load, Run, System
from bench.harness.topic import Step, engine_settings
from bench.peers.catalog import PeerKind
from bench.peers.checkpoints import checkpoint, converted
from bench.systems.engine_alone import NAME as ALONE
from bench.systems.engine_alone import engine_alone
from bench.systems.ring import NAME as RING
from bench.systems.ring import through_ring
from engine_worker.openvino.compiled import has_bfloat16
from sluice.settings.services import EngineSettings

BASES = {"generate": "transformers generate", "continuous": "transformers continuous batching"}
"""Modes of transformers, with their names in tables."""
FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
PRECISIONS = FLOAT32, BFLOAT16, INT8


class Ours(msgspec.Struct, frozen=True):
    """A configuration of Sluice: an engine with these settings."""

    title: str
    precision: str
    settings: dict[str, Any]
    with_ring: bool = True

    @property
    def is_possible(self) -> bool:
        """Whether this version has these settings, and this CPU supports them."""
        known = {field.name for field in fields(EngineSettings)} >= self.settings.keys()
        return known and (self.settings.get("dtype") != BFLOAT16 or has_bfloat16())


OURS = (
    Ours("", FLOAT32, {"backend": "openvino"}),
    Ours("", INT8, {"backend": "openvino", "quantize": "int8"}),
    Ours("", BFLOAT16, {"backend": "openvino", "dtype": "bfloat16"}),
    Ours("computed in bfloat16", INT8, {"backend": "openvino", "quantize": "int8", "dtype": "bfloat16"}),
    Ours("torch", FLOAT32, {"backend": "torch"}),
)


class Named:
    """A system with its name in a table. Not all systems support cache salts, so the prompts themselves are salted."""

    def __init__(self, name: str, system: System) -> None:
        self.name = name
        self._system = system

    def run(self, load: Load) -> Run:
        run = self._system.run(load.salted())
        found = sum(sum(trace.counts) for trace in run.traces)
        if found != load.tokens:
            raise RuntimeError(f"{self.name} generated {found} tokens instead of {load.tokens}")
        return run


class Contender(msgspec.Struct, frozen=True):
    system: Named
    precision: str
    is_ours: bool


class Field(msgspec.Struct, frozen=True):
    """The systems to compare on one checkpoint."""

    model: str
    bases: Sequence[str]
    """Modes of transformers, keys of BASES."""
    ours: Sequence[Ours]
    peers: Sequence[PeerKind]
    threads: int
    width: int
    """Largest number of requests in flight."""
    kv_cache_tokens: int
    precisions: Sequence[str] = PRECISIONS
    """Precisions of peers and of Sluice that take part."""

    @contextmanager
    def started(self, logs: Path, step: Step) -> Iterator[list[Contender]]:
        """Starts every system that is installed; the processes end with the context."""
        logs = logs / self.model
        logs.mkdir(exist_ok=True)
        with ExitStack() as stack:
            bases = [self._base(mode, logs, stack) for mode in self.bases]
            peers = [
                self._peer(kind, precision, logs, stack, step)
                for kind in self.peers
                for precision in (kind.precisions if kind.is_installed else ())
                if precision in self.precisions
            ]
            rows = [one for one in self.ours if one.is_possible and one.precision in self.precisions]
            ours = [each for one in rows for each in self._ours(one, logs, stack)]
            yield [*bases, *peers, *ours]

    def _base(self, mode: str, logs: Path, stack: ExitStack) -> Contender:
        options = [str(checkpoint(self.model)), mode, str(self.threads), str(self.width)]
        child = SystemProcess(mode, "bench.systems.transformers_peer", options, logs / f"{mode}.log")
        return Contender(Named(BASES[mode], stack.enter_context(child)), FLOAT32, is_ours=False)

    def _peer(self, kind: PeerKind, precision: str, logs: Path, stack: ExitStack, step: Step) -> Contender:
        name, file = f"{kind.title}, {precision}", f"{kind.name}-{precision}"
        step(f"{name}: converting {self.model}")
        folder = converted(kind, self.model, precision, logs / f"{file}-convert.log")
        options = ["serve", str(folder), str(self.threads), str(self.width)]
        child = SystemProcess(name, kind.module, options, logs / f"{file}.log", python=kind.python)
        return Contender(Named(name, stack.enter_context(child)), precision, is_ours=False)

    def _ours(self, ours: Ours, logs: Path, stack: ExitStack) -> Iterator[Contender]:
        model, label = checkpoint(self.model), ", ".join(filter(None, (ours.precision, ours.title)))
        settings = engine_settings(self.threads, kv_cache_tokens=self.kv_cache_tokens, **ours.settings)
        folder = logs / label
        folder.mkdir(exist_ok=True)
        alone = stack.enter_context(engine_alone(model, settings, folder))
        yield Contender(Named(f"{ALONE}, {label}", alone), ours.precision, is_ours=True)
        if ours.with_ring:
            ring = stack.enter_context(through_ring(model, settings, folder))
            yield Contender(Named(f"{RING}, {label}", ring), ours.precision, is_ours=True)
