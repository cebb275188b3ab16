"""What the engine asks of the runner in one step, and what comes back: plain data, no tensors.

A step is a list of slices, one per sequence, context and generation alike: the tokens of the sequence whose keys and
values are to be computed now. A slice that reaches the sequence's last token also samples.

Some of each are made per sequence and step: as Structs, which take a tenth of a frozen dataclass's time to make.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from sluice.ring.errors import Fault
from sluice.ring.params import SamplingParams
from sluice.ring.wire import TokenLogprob


class Draw(msgspec.Struct, frozen=True):
    """One token to sample."""

    sampling: SamplingParams
    sequence: int
    """Index of the sequence in its request; together with seed and position the key of its noise."""
    position: int
    """Offset of the new token in the continuation, from 0."""
    prompt: Sequence[int]
    """Token ids; read only when a penalty is set. Owned by the engine: do not keep."""
    output: Sequence[int]
    """Token ids so far. Owned by the engine: do not keep."""
    banned: tuple[int, ...] = ()
    """Ids that may not come now: end and stop ids before min_tokens."""


class Slice(msgspec.Struct, frozen=True):
    """One sequence's part in a step."""

    tokens: Sequence[int]
    """At least one token id."""
    start: int
    """Position of the first of them in the sequence; everything before it is in the cache."""
    block_table: Sequence[int]
    """Blocks that hold positions 0 to start + len(tokens) - 1, and possibly more."""
    draws: tuple[Draw, ...] = ()
    """All from the logits after the last token: none mid-context, one per sequence after its context, else one."""
    follows: int | None = None
    """Where the last of `tokens` is not known yet: which draw of the step launched before this one gives it. The number
    in `tokens` then means nothing, and neither `output` of the draws has that token."""


class MoveKind(Enum):
    """Between which memories a block's content moves."""

    COPY = "copy"
    """Device to device: a forked sequence gets its own copy of a partly filled block."""
    OFFLOAD = "offload"
    """Device to host: an evicted block goes on being findable."""
    ONLOAD = "onload"
    """Host to device."""


class Move(NamedTuple):
    """One block's content, all layers, from one place to another."""

    kind: MoveKind
    source: int
    target: int


class Step(msgspec.Struct, frozen=True):
    """The work of one step. Moves come first, one after the other: a later one may read what an earlier one wrote."""

    slices: tuple[Slice, ...]
    moves: tuple[Move, ...] = ()


class Drawn(msgspec.Struct, frozen=True):
    """One sampled token, or why there is none."""

    token: int
    logprob: TokenLogprob | None = None
    """When the draw's sampling.logprobs is set."""
    fault: Fault | None = None
    """The sequence ends with it; `token` means nothing."""


class DeviceLostError(RuntimeError):
    """The device answers no more, and will not in this process: no other step can succeed."""


class Launched(Protocol):
    """A step on its way."""

    def collect(self) -> list[Drawn]:
        """Wait for one result per draw, in order of slices and their draws. Raises on a fault of the whole step."""
        ...


class Runner(Protocol):
    """Computes steps in the order in which they were launched. The engine calls it from one thread.

    After a step that failed, a slice that follows one of its draws may be computed with any token.
    """

    num_blocks: int
    """Size of the block pool."""
    num_host_blocks: int
    """Size of the pool in host memory; 0 without one."""
    tokens_per_block: int
    window: int | None
    """Tokens that the last one sees at most, itself included, in every layer; None: all. Blocks that lie wholly behind
    the window of a slice's first token are never read: their entries in the table may be anything."""
    dtype: str
    """In which it computes, such as "float32"."""
    choices: dict[str, str]
    """What it is, for the log: device, dtype, attention."""
    overlap: bool
    """Whether `launch` returns before the step is computed, so that the next one can be planned meanwhile."""

    def launch(self, step: Step) -> Launched:
        """Compute a step after those before it. What the step refers to may change as soon as it is collected."""
        ...

    def check(self) -> None:
        """After a step that failed: raise DeviceLostError where all that come would fail too."""
        ...
