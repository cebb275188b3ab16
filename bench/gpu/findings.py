"""Results, as they are stored in gpu.json."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RUNS = "runs"


def write_whole(file: Path, text: str) -> None:
    """Replaces the file atomically, so that it always contains the complete old or new text."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


class Skip(Exception):  # noqa: N818 - not an error
    """A check or measurement that is impossible on this machine; the message has the reason."""


class Outcome(NamedTuple):
    """The result of a check."""

    passed: bool
    detail: str

    @classmethod
    def of_error(cls, error: Exception) -> "Outcome":
        return cls(passed=False, detail=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def __str__(self) -> str:
        return f"{'holds' if self.passed else 'DOES NOT HOLD'}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Rates:
    copy_bytes_per_second: float
    """Bytes read and written per second when a large buffer is copied."""
    flops_per_second: float
    """Rate of a large matrix product in the models' dtype."""

    def __str__(self) -> str:
        return f"{self.copy_bytes_per_second / 1e9:,.0f} GB/s, {self.flops_per_second / 1e12:,.3g} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Decode:
    shape: str
    mode: str
    batch: int
    context: int
    """Mean context length of a sequence in the measured steps."""
    step_seconds: float
    tokens_per_second: float
    bytes_per_second: float
    """Bytes of weights and KV cache that a step must read, divided by its time."""

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s, {self.bytes_per_second / 1e9:,.0f} GB/s"


@dataclass(frozen=True, slots=True)
class PromptRate:
    shape: str
    prompts: int
    prompt_tokens: int
    tokens_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s, {self.flops_per_second / 1e12:,.3g} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Gaps:
    shape: str
    mode: str
    batch: int
    overlap: bool
    step_seconds: float
    idle_seconds: float
    """Idle time per step in gaps of a minimum length, measured under the profiler, which slows the host."""
    longest_seconds: float

    def __str__(self) -> str:
        return f"idle {self.idle_seconds * 1e6:,.0f} µs of each step's {self.step_seconds * 1e6:,.0f}"


@dataclass(frozen=True, slots=True)
class Join:
    """A prompt that is processed together with generating sequences."""

    shape: str
    mode: str
    batch: int
    prompt_tokens: int
    step_seconds: float
    """Time of a step without the prompt."""
    join_seconds: float
    """Time of the step with the prompt."""

    def __str__(self) -> str:
        return f"{self.join_seconds * 1e3:.2f} ms, other steps {self.step_seconds * 1e3:.2f}"


@dataclass(frozen=True, slots=True)
class Throughput:
    system: str
    shape: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s"


@dataclass(frozen=True, slots=True)
class Tried:
    kernel: str
    place: str
    ended: str
    """"runs", or the reason why the kernel does not run."""
    absent: bool = False
    """The kernel is not installed or does not support these heads, which is not a failure."""
    crashed: bool = False
    first: float = 0.0
    """Seconds of the first round, including compilation."""
    fastest: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    phase: str
    allocated: int
    """Bytes of tensors of this process."""
    reserved: int
    free: int


@dataclass(slots=True)
class Findings:
    """All results so far; tasks add to it."""

    origin: dict[str, str]
    rates: Rates | None = None
    checks: list[Check] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    context: list[PromptRate] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Warnings, shown before the figures."""
    tried: list[Tried] = field(default_factory=list)
    memory: list[DeviceMemory] = field(default_factory=list)
    blamed: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    """The running task; empty at the end."""

    @property
    def passed(self) -> bool:
        sound = all(one.absent or one.ended == RUNS for one in self.tried)
        return not self.failed and sound and all(check.passed for check in self.checks)

    def save(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> "Findings":
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        tasks = {"checks": Check, "decode": Decode, "context": PromptRate, "joins": Join, "gaps": Gaps}
        lists: dict[str, type[Any]] = tasks | {"throughput": Throughput, "tried": Tried, "memory": DeviceMemory}
        made = {name: [kind(**entry) for entry in data[name]] for name, kind in lists.items()}
        rates = None if data["rates"] is None else Rates(**data["rates"])
        return cls(**(data | made | {"rates": rates}))
