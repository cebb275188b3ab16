"""The interface of a runner, which computes the engine's steps, and of the objects that it returns."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Drawn, KeptRows, SequenceRules, Slice, Step
from sluice.wire.calls import MethodCall, RankAnswer
from sluice.wire.errors import Fault
from sluice.wire.requests import Submit


class Launched(Protocol):
    """A step in flight."""

    def collect(self) -> list[Drawn]:
        """Wait for one result per draw, in the order of slices and draws. Raises if the step as a whole failed."""

    def missing_adapters(self) -> Mapping[int, str]:
        """After `collect`: numbers of the slices' adapters that are not on the device, with the reason: their load has
        failed in this step or an earlier one. The results of these slices are meaningless."""

    def prompt_logprobs(self) -> list[bytes]:
        """After `collect`: the rows of each slice with `scored`, in order, encoded as in
        `sluice.wire.prompt_logprobs`."""

    def kept_rows(self) -> list[list[KeptRows]]:
        """After `collect`: for each `Kept` of each slice, in order, the rows of each tensor, in consecutive parts."""


class Preparation(Protocol):
    """Work that must finish before a request can run, such as compiling a guide."""

    @property
    def done(self) -> bool:
        """Whether the work has ended, successfully or not."""

    @property
    def fault(self) -> Fault | None:
        """Why the request cannot run; known once `done`."""

    def poll(self) -> bool:
        """Update `done` of this and all other preparations, and return this one's; never waits."""

    def withdraw(self) -> None:
        """Stop waiting; called once for each request that no longer waits for the result."""


class Loading(Preparation, Protocol):
    """An adapter that is being loaded to host memory."""

    version: str
    """Known, as `rank` is, once it is done without a fault."""
    rank: int


class HostUsage(NamedTuple):
    """Usage of host memory for LoRA adapters. Counts are since the start."""

    adapters: int
    used_bytes: int
    max_bytes: int
    evictions: int
    loads: Mapping[str, int]
    """Number of loads by outcome: LOADED or an error code."""


class ImageUsage(NamedTuple):
    """Usage of host memory for the rows of images. Counts are since the start."""

    images: int
    used_bytes: int
    max_bytes: int
    evictions: int
    lookups: Mapping[str, int]
    """Number of lookups by result: "hit", "miss", or "recomputed" for rows that a step needed after they were evicted.
    """


class AdapterLibrary(Protocol):
    """The LoRA adapters in host memory, by version. Called in the engine's thread; never waits.

    An adapter stays in host memory while live requests use it.
    """

    num_pages: int
    """Pages on the device, for all adapters."""

    @property
    def usage(self) -> HostUsage:
        """May be read in any thread."""

    def load(self, path: str) -> Loading:
        """Load an adapter from a folder on this machine."""

    def offer(self, version: str, parts: Sequence[bytes]) -> Loading:
        """Load an uploaded adapter. `parts`: the data of all its parts, see `AdapterPart`. Its fault is ADAPTER_MISSING
        if the data has another version."""

    def rank(self, version: str) -> int | None:
        """The largest rank of an adapter in host memory; None if it is not there."""

    def remove(self, version: str) -> bool:
        """Remove an adapter from host memory; False, with no effect, if a request uses it."""

    def pages_of(self, version: str) -> int:
        """Pages that an adapter in host memory takes on the device."""

    def acquire(self, version: str) -> None:
        """Count a request that uses the adapter, which may still be loading."""

    def release(self, version: str) -> None:
        """Undo `acquire` when the request has ended."""


class PendingCall(Protocol):
    """A method that is running on the ranks."""

    def poll(self) -> list[RankAnswer] | None:
        """The answers of all ranks, in order of rank; None until all have arrived. Never waits."""


class Runner(Protocol):
    """Computes steps in the order of their launch. Called in one thread.

    After a failed step, a slice that `follows` one of its draws may be computed with an arbitrary token.
    """

    num_blocks: int
    """Size of the device's block pool."""
    num_host_blocks: int
    """Size of the block pool in host memory; 0: none."""
    tokens_per_block: int
    window: int | None
    """Limit on the tokens that a token attends to, itself included, in all layers; None: no limit. Blocks entirely
    before the window of a slice's first token are never read, so their entries in the block table are arbitrary."""
    dtype: str
    """Data type of the computation, such as "float32"."""
    choices: dict[str, str]
    """What was chosen at start-up, for the log: device, dtype, attention, …"""
    exact: bool
    """Whether the bits of a token's logits depend only on its own sequence and on how many of the sequence's tokens
    are computed with it: not on the rest of the step."""
    separates: bool
    """Whether slices may be `separate`."""
    overlap: bool
    """Whether `launch` returns before the step is computed, so that the next one can be planned meanwhile."""
    draft_context: int | None
    """Tokens of the longest sequence that the draft model can compute; None: there is no draft model."""

    hidden_size: int
    """Size of the rows of prompt tables; 0: prompts may not have tables."""

    @property
    def pool_file(self) -> PoolFile | None:
        """The file in which the blocks of one of the pools are. None: their memory is private."""

    @property
    def pool_folder(self) -> PoolFolder | None:
        """Where to look for blocks that other engines have computed. None: nowhere."""

    @property
    def image_rows(self) -> int:
        """Rows of each image in a prompt; 0: prompts may not have images."""

    @property
    def image_usage(self) -> ImageUsage | None:
        """May be read in any thread. None: prompts may not have images."""

    @property
    def adapters(self) -> AdapterLibrary | None:
        """None: requests may not name adapters."""

    @property
    def tensors(self) -> Mapping[str, int]:
        """Names of the tensors whose rows can be kept, with the bytes of one row."""

    def prepare(self, submit: Submit, *, running: bool = False) -> Preparation | None:
        """Start the work that the request needs before its first step or, if it is `running`, before its postponed
        draws; None if it can run immediately."""

    def logit_rules(self, submit: Submit) -> Sequence[SequenceRules | None]:
        """The rules of each of the request's n sequences; None if the logits need no edits. The engine keeps it with
        the sequence and passes it back in the sequence's draws."""

    def launch(self, step: Step) -> Launched:
        """Start computing a step, after those launched before. Lists that it refers to may change only once it is
        collected."""

    def draft(self, slices: Sequence[Slice]) -> list[Drawn]:
        """Compute slices by the draft model, after the steps launched so far, and wait for the draws. The draft model
        has separate keys and values for the same blocks; moves of steps include them. Raises if it fails; steps can
        still be computed then."""

    def call(self, call: MethodCall) -> PendingCall:
        """Run a method on the ranks, after the steps launched so far. A failure is an answer, never an exception."""

    def check(self) -> None:
        """Called after a failed step: raises DeviceLostError if all later steps would fail too."""
