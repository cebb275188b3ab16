"""Engines of one machine, in the state machine of engines that share a folder of pool files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_worker.pool_files.folder import PoolFolder
from sluice.wire.requests import Submit
from tests.engine_worker.core.machine_checks import COMPLETE
from tests.fakes.engine import EngineBench
from tests.fakes.machine_keepers import Asking
from tests.fakes.pool_files import Reader
from tests.fakes.submits import with_extras

NO_RESUME: dict[int, list[int]] = {}


@dataclass
class Seat:
    """A slot for an engine, which is empty between the engine's death and its restart."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)
    """The machine's attributes for the living engine; empty: it is dead."""
    reader: Reader | None = None
    asking: Asking | None = None
    """None: no keepers are asked."""
    speed: int = 3
    """Blocks that the reader copies in the time of a step."""

    apart: bool = False
    """Whether it is on a machine of its own, whose files only keepers hand out to others."""

    def place(self, path: Path) -> Path:
        """The folder of its machine."""
        return path / self.name if self.apart else path

    def folder(self, path: Path) -> PoolFolder:
        return PoolFolder(self.place(path), self.name, ignore)


@dataclass
class Orphan:
    """A request whose engine has died, or from which it is taken."""

    spec: Submit
    resume: dict[int, list[int]]
    ended: list[int]
    disturbed: bool

    @classmethod
    def of(cls, bench: EngineBench, spec: Submit, *, disturbed: bool) -> "Orphan | None":
        """What a router knows of a request; None if it is complete."""
        resume, ended = dict(spec.resume), set(spec.ended)
        for sequence in spec.remaining:
            stream = bench.receiver.streams.get((spec.request, spec.attempt, sequence))
            if stream is None:
                continue
            resume[sequence] = list(stream.tokens)
            if stream.end is not None:
                if stream.end.reason not in COMPLETE:
                    # Cancelled, failed or refused: nobody continues it.
                    return None
                ended.add(sequence)
        return None if len(ended) == spec.n else cls(spec, resume, sorted(ended), disturbed)

    def next_attempt(self, number: int) -> dict[str, Any]:
        """Fields that differ in the request's next attempt, which has another number on another engine."""
        return {"request": number, "attempt": 0, "resume": self.resume, "ended": self.ended}


def without_rows(spec: Submit) -> Submit:
    """Without what the router would have to ask for from where it was interrupted."""
    return with_extras(spec, prompt_logprobs=None, tensors=None)


def ignore(_reason: str) -> None:
    pass
