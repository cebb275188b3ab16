"""What was found, as it goes into the JSON file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.files import write_whole

RUNS = "runs"
"""How a trial ended well."""


class Skip(Exception):  # noqa: N818 - nothing went wrong
    """Something cannot be checked or measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that has to hold."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device can do, measured in the same run."""

    copy_bytes_per_second: float
    """Read and written, by a copy of one large buffer into another."""
    flops_per_second: float
    """Of one large matrix product in the models' dtype."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Generation steps of so many sequences, through the engine's own loop."""

    shape: str
    mode: str
    batch: int
    context: int
    """Tokens of a sequence, in the middle of what was measured."""
    step_seconds: float
    tokens_per_second: float
    bytes_per_second: float
    """Weights and KV cache that a step has to read, by its time."""


@dataclass(frozen=True, slots=True)
class Context:
    """Prompts, through the engine's own loop."""

    shape: str
    prompts: int
    prompt_tokens: int
    tokens_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """When the device had nothing to do in generation steps."""

    shape: str
    mode: str
    batch: int
    overlap: bool
    step_seconds: float
    """Without the profiler."""
    idle_seconds: float
    """Per step, in stretches long enough to count, while profiled: that makes the host slower."""
    longest_seconds: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests handed in at once, from the first submission to the last token."""

    system: str
    shape: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    """Output tokens of all requests."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A kernel on one kind of heads, in a process of its own."""

    kernel: str
    place: str
    ended: str
    """"runs", or why not."""
    absent: bool = False
    """It is not here, or not for these: nothing is amiss."""
    crashed: bool = False
    """Its process died or was too slow."""
    first: float = 0.0
    """Seconds of the first round, which compiles."""
    fastest: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the device, in bytes, after a phase."""

    phase: str
    allocated: int
    """By tensors of this process."""
    reserved: int
    """By torch, for tensors that are and that were."""
    free: int


@dataclass(slots=True)
class Findings:
    """All of it. Grows while tasks run."""

    origin: dict[str, str]
    rates: Rates | None = None
    checks: list[Check] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    context: list[Context] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the engine chose, by shape."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By what, why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tracebacks, by task."""
    facts: dict[str, str] = field(default_factory=dict)
    """About the machine."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know before the figures."""
    tried: list[Tried] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    """Of the default path."""
    blamed: dict[str, str] = field(default_factory=dict)
    """By check that did not hold, what is at fault."""
    doing: str = ""
    """The task under way; "" at the end."""

    @property
    def passed(self) -> bool:
        """Nothing that was checked or tried went wrong."""
        sound = all(one.absent or one.ended == RUNS for one in self.tried)
        return not self.failed and sound and all(check.passed for check in self.checks)

    def save(self, file: Path) -> None:
        """As JSON."""
        write_whole(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> "Findings":
        """From JSON."""
        return cls.of(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Findings":
        """What `asdict` makes of findings, back."""
        lists = {
            "checks": Check,
            "decode": Decode,
            "context": Context,
            "gaps": Gaps,
            "throughput": Throughput,
            "tried": Tried,
            "memory": Memory,
        }
        made = {name: [kind(**entry) for entry in data[name]] for name, kind in lists.items()}
        rates = None if data["rates"] is None else Rates(**data["rates"])
        return cls(**(data | made | {"rates": rates}))
