"""A step, as the engine asks a runner for it, and its results. Plain data, no tensors.

A step is a list of slices, one per sequence, context and generation alike: the tokens whose keys and values are
computed now. A slice that reaches the sequence's last token also samples.

These are msgspec Structs because several are created per sequence and step: a Struct takes a tenth of the time of a
frozen dataclass. The garbage collector need not look at them: no cycle leads through them.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.positions import Positions
from sluice.ring.errors import Fault
from sluice.ring.params import SamplingParams
from sluice.ring.rows import TokenLogprob
from sluice.ring.tables import VirtualTokens
from sluice.ring.tensors import DType


class SequenceProgram(Protocol):
    """What makes a sequence's logits depend on its tokens."""

    def fork(self) -> "SequenceProgram":
        """Its copy, for another sequence that begins with the same tokens. Not while a draw with it is in flight."""


class Proposal(msgspec.Struct, frozen=True, eq=False):
    """A token that was drawn from another distribution, to be accepted or rejected; see `sampling.rejection`."""

    token: int
    logits: NDArray[np.float32]
    """[vocab], of that distribution."""
    threshold: float | None
    """None: random."""


class Draw(msgspec.Struct, frozen=True, gc=False):
    """One token to sample."""

    sampling: SamplingParams
    sequence: int
    """Index of the sequence in its request; with seed and position the key of the sampling noise."""
    position: int
    """Offset of the new token in the continuation, from 0."""
    output: Sequence[int] = ()
    """Token ids so far. The engine's own list, which only grows. Read only by a program."""
    program: SequenceProgram | None = None
    """The sequence's own, from `Runner.programs`."""
    banned: tuple[int, ...] = ()
    """Token ids that may not be drawn: end and stop ids before min_tokens."""
    drafted: Sequence[int] = ()
    """Guesses between `output` and this token."""
    candidates: int = 0
    """Of a beam: how many of the most likely tokens are wanted, instead of one that is chosen."""
    proposal: Proposal | None = None
    """Accepted, or the token is drawn from what remains; None: drawn plainly."""


class Scored(msgspec.Struct, frozen=True):
    """Prompt tokens whose log-probabilities are wanted, given those before each."""

    start: int
    """Position of the first token that is followed by one of them, in this slice."""
    tokens: Sequence[int]
    """The tokens themselves, from position start + 1 on: at least one."""
    top: int
    """Number of alternatives."""


LOGITS = "logits"
"""The tensor of `Runner.tensors` that every model has: [vocab] float32, as the model computed them."""


class Kept(msgspec.Struct, frozen=True):
    """Consecutive positions whose rows of tensors are wanted."""

    start: int
    """The first of them, in this slice."""
    count: int
    names: tuple[str, ...]
    """Of `Runner.tensors`."""
    context: bool
    """Wanted as rows of the prompt; else as rows of the output."""


class KeptRows(NamedTuple):
    """Consecutive rows of one tensor, in host memory."""

    name: str
    start: int
    """Position of the first row."""
    shape: tuple[int, ...]
    dtype: DType
    data: memoryview
    """Row-major, little-endian."""


class AdapterLoad(NamedTuple):
    """Copies a LoRA adapter from host memory to the device."""

    number: int
    """By which slices name it from this step on; from 1, never used twice."""
    version: str
    """By which it is found in host memory."""
    pages: tuple[int, ...]
    """Where it goes: pages of its modules, in the order of the model's targets."""
    dropped: tuple[int, ...] = ()
    """Numbers of adapters that were evicted before."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence."""

    tokens: Sequence[int]
    """At least one token id."""
    start: int
    """Position of the first of them; everything before it is in the KV cache."""
    block_table: Sequence[int]
    """Blocks of positions 0 to start + len(tokens) - 1, possibly more."""
    draws: tuple[Draw, ...] = ()
    """All from the logits of the last token: none in the middle of a context, one for each sequence that shares a
    prompt at the prompt's end, else one. With drafts one from each of the last tokens."""
    follows: int | None = None
    """Set when the last of `tokens` is still being drawn: index of its draw in the step launched before this one. The
    id in `tokens` is then a placeholder, and the draws' `output` lacks that token."""
    drafts: int = 0
    """So many of `tokens`, the last ones, are guesses: each of them, and the token before them, has a draw."""
    scored: Scored | None = None
    kept: tuple[Kept, ...] = ()
    adapter: int = 0
    """Number of its LoRA adapter; 0: none."""
    virtual: VirtualTokens | None = None
    """What ids from the size of the vocabulary on stand for; None: `tokens` has none."""
    positions: Positions | None = None
    """Where the rotary embedding puts them; None: at their indexes."""

    @property
    def rows(self) -> list[range]:
        """Indexes, in `tokens`, of those whose rows are wanted beside the draws': for `scored`, then for `kept`."""
        found = []
        if self.scored is not None:
            first = self.scored.start - self.start
            found.append(range(first, first + len(self.scored.tokens)))
        for kept in self.kept:
            first = kept.start - self.start
            found.append(range(first, first + kept.count))
        return found


class MoveKind(Enum):
    COPY = "copy"
    """Within the device: a forked sequence gets its own copy of a partly filled block."""
    OFFLOAD = "offload"
    """Device to host: an evicted block stays findable."""
    ONLOAD = "onload"


class Move(NamedTuple):
    """Copies the content of one block, all layers, from `source` to `target`."""

    kind: MoveKind
    source: int
    target: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """Moves first, in order (a later one may read what an earlier one wrote), and loads, then the slices."""

    slices: tuple[Slice, ...]
    moves: tuple[Move, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """One sampled token, a beam's candidates, or a fault."""

    token: int
    logprob: TokenLogprob | None = None
    """Present if the draw's sampling.logprobs is set."""
    fault: Fault | None = None
    """Ends the sequence; `token` is then meaningless."""
    complete: bool = False
    """Nothing can follow the tokens before this draw: the sequence ends with them; `token` is then meaningless."""
    best: Sequence[tuple[int, float]] = ()
    """The draw's `candidates` that are possible, with their log-probabilities after all edits, the best first. `token`
    is then meaningless."""
    postponed: bool = False
    """The sequence's guide is not ready: prepare its request, then draw again. `token` is then meaningless."""

    @property
    def drew(self) -> bool:
        """Whether a token was chosen."""
        return self.fault is None and not (self.complete or self.best or self.postponed)


class DeviceLostError(RuntimeError):
    """The device has failed irrecoverably: no step of this process can succeed any more."""
