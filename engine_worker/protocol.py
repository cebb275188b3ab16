"""What the engine needs of a runner, which computes its steps, and of what the runner hands out."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine_worker.step import Drawn, KeptRows, SequenceProgram, Slice, Step
from sluice.ring.calls import MethodCall, RankAnswer
from sluice.ring.errors import Fault
from sluice.ring.wire import Submit


class Launched(Protocol):
    """A step in flight."""

    def collect(self) -> list[Drawn]:
        """Wait for one result per draw, in the order of slices and draws. Raises if the step as a whole failed."""

    def missing_adapters(self) -> Mapping[int, str]:
        """Once collected: adapters of its slices that are not on the device, because their load failed in this step or
        in one before, by number, with the reason. The results of these slices are meaningless."""

    def prompt_logprobs(self) -> list[bytes]:
        """Once collected: of each slice with `scored`, in order, the rows as in `sluice.ring.prompt_logprobs`."""

    def kept_rows(self) -> list[list[KeptRows]]:
        """Once collected: of each `kept` of each slice, in order, each tensor's rows, in consecutive parts."""


class Preparation(Protocol):
    """What a request needs before it can run is being made."""

    @property
    def done(self) -> bool:
        """Whether that has ended, well or not."""

    @property
    def fault(self) -> Fault | None:
        """Why it cannot run; known once it is done."""

    def poll(self) -> bool:
        """Update `done`, of this and of all other preparations, and return it; never waits."""

    def withdraw(self) -> None:
        """Called instead of waiting for its end, once for each request that was waiting."""


class Loading(Preparation, Protocol):
    """An adapter on its way to host memory."""

    version: str
    """Known once it is done without a fault; so is `rank`."""
    rank: int


class HostUsage(NamedTuple):
    """Of host memory for LoRA adapters; counts are those since the start."""

    adapters: int
    used_bytes: int
    max_bytes: int
    evictions: int
    loads: Mapping[str, int]
    """By outcome: LOADED or an error code."""


class ImageUsage(NamedTuple):
    """Of host memory for the rows of images; counts are those since the start."""

    images: int
    used_bytes: int
    max_bytes: int
    evictions: int
    lookups: Mapping[str, int]
    """By what was found: "hit", "miss", or "recomputed", where a step needed rows that were evicted after the request's
    start."""


class AdapterLibrary(Protocol):
    """The LoRA adapters in host memory, by version. Called from the engine's thread; never waits.

    Requests that use one are counted, so that it stays there while they live.
    """

    num_pages: int
    """On the device, for all adapters."""

    @property
    def usage(self) -> HostUsage:
        """For any thread."""

    def load(self, path: str) -> Loading:
        """From a folder on this machine."""

    def offer(self, version: str, parts: Sequence[bytes]) -> Loading:
        """That was uploaded: the data of all parts, see `AdapterPart`. ADAPTER_MISSING: not this version."""

    def held(self) -> list[str]:
        """Versions in host memory."""

    def remove(self, version: str) -> bool:
        """From host memory; False: a request uses it."""

    def pages_of(self, version: str) -> int:
        """Pages that it takes on the device; it must be in host memory."""

    def acquire(self, version: str) -> None:
        """A request that uses it has begun, though it may still be loading."""

    def release(self, version: str) -> None:
        """That request has ended."""


class PendingCall(Protocol):
    """A method that runs on the ranks."""

    def poll(self) -> list[RankAnswer] | None:
        """All answers, by rank, once they are there; never waits."""


class Runner(Protocol):
    """Computes steps in launch order. Called from one thread.

    After a failed step, a slice that `follows` one of its draws may be computed with any token.
    """

    num_blocks: int
    """Size of the device's block pool."""
    num_host_blocks: int
    """Size of the pool in host memory; 0: none."""
    tokens_per_block: int
    window: int | None
    """Tokens that a token attends to at most, itself included, in every layer; None: all. Blocks wholly behind the
    window of a slice's first token are never read, so their entries in the block table are arbitrary."""
    dtype: str
    """Of the computation, such as "float32"."""
    choices: dict[str, str]
    """For the log: device, dtype, attention."""
    overlap: bool
    """Whether `launch` returns before the step is computed, so that the next one can be planned meanwhile."""
    draft_context: int | None
    """Tokens of the longest sequence that the draft model can compute; None: there is no draft model."""

    hidden_size: int
    """Of the rows of tables that prompts may have; 0: they may have none."""

    @property
    def image_rows(self) -> int:
        """Of each image that prompts may have; 0: they may have none."""

    @property
    def image_usage(self) -> ImageUsage | None:
        """For any thread. None: prompts may have no images."""

    @property
    def adapters(self) -> AdapterLibrary | None:
        """None: requests cannot name adapters."""

    @property
    def tensors(self) -> Mapping[str, int]:
        """Names of the tensors whose rows can be kept, with the bytes of one row."""

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        """Begin what the request needs before its first step, or before it draws what was postponed if it is `running`;
        None: it can run at once."""

    def programs(self, spec: Submit) -> Sequence[SequenceProgram | None]:
        """For each of the request's n sequences what makes its logits depend on its tokens; None: nothing does. The
        engine keeps it with the sequence and passes it back in the sequence's draws."""

    def launch(self, step: Step) -> Launched:
        """Start computing a step after those launched before it. What it refers to may change once it is collected."""

    def draft(self, slices: Sequence[Slice]) -> list[Drawn]:
        """Compute slices by the draft model, after the steps launched so far, and wait for its draws. It has keys and
        values of its own in the same blocks, which the moves of steps move along. Raises if that failed; steps can be
        computed all the same."""

    def call(self, call: MethodCall) -> PendingCall:
        """Run a method on the ranks, after the steps launched so far. Its failure is an answer, never an exception."""

    def check(self) -> None:
        """Called after a failed step: raises DeviceLostError if all later ones would fail too."""
