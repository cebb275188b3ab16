"""A step that the engine passes to a runner, and its results. Plain data, no tensors.

A step is a list of slices, one per sequence, for context and generation alike: the tokens whose keys and values the
step computes. A slice that reaches the sequence's last token also samples.

The types are msgspec Structs because several are created per sequence and step: creating a Struct takes a tenth of the
time of a frozen dataclass. Where `gc` is off, the garbage collector skips them, because they cannot be part of a cycle.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_worker.positions import Positions
from sluice.wire.errors import Fault
from sluice.wire.params import SamplingParams
from sluice.wire.rows import TokenLogprob
from sluice.wire.tables import VirtualTokens
from sluice.wire.tensors import DType

NO_LIMIT = 1 << 62
"""No limit on a number of tokens or bytes: more than any request reaches."""


class SequenceRules(Protocol):
    """State of a sequence that changes its logits depending on its tokens: penalties, bans, a guide."""

    def fork(self) -> "SequenceRules":
        """A copy for another sequence that begins with the same tokens. Must not be called while a draw with these
        rules is in flight."""


class Proposal(msgspec.Struct, frozen=True, eq=False):
    """A draft token that was sampled from another distribution, to be accepted or rejected by `sampling.rejection`."""

    token: int
    logits: NDArray[np.float32]
    """[vocab]: logits of that distribution."""
    threshold: float | None
    """Ratio of the model's probability of the token to that distribution's from which on the token is accepted; None:
    accepted at random, as in rejection sampling."""


class Draw(msgspec.Struct, frozen=True, gc=False):
    """One token to sample."""

    sampling: SamplingParams
    sequence: int
    """Index of the sequence in its request; together with seed and position the key of the sampling noise."""
    position: int
    """Offset of the new token in the continuation, from 0."""
    output: Sequence[int] = ()
    """Known output tokens: the engine's list itself, which only grows. Only logit rules read it."""
    rules: SequenceRules | None = None
    """The sequence's rules, from `Runner.logit_rules`."""
    banned: tuple[int, ...] = ()
    """Token ids that must not be sampled: end and stop ids before min_tokens."""
    drafted: Sequence[int] = ()
    """Draft tokens between `output` and this token."""
    candidates: int = 0
    """For a beam: the number of most likely tokens to return instead of a sampled one. 0: sample a token."""
    proposal: Proposal | None = None
    """If it is rejected, the token is sampled from the rest of the distribution. None: plain sampling."""


class Scored(msgspec.Struct, frozen=True):
    """Prompt tokens whose log-probabilities a slice computes."""

    start: int
    """Position of the token before the first of them; it is in the slice."""
    tokens: Sequence[int]
    """The prompt tokens, from position start + 1 on: at least one."""
    top: int
    """Number of alternatives per token."""


LOGITS = "logits"
"""The tensor of `Runner.tensors` that every model has: [vocab] float32 per position, before any logit edits."""


class Kept(msgspec.Struct, frozen=True):
    """Consecutive positions of a slice whose rows of tensors the step keeps for the client."""

    start: int
    """The first position."""
    count: int
    names: tuple[str, ...]
    """Keys of `Runner.tensors`."""
    context: bool
    """Whether these are rows of the prompt's tensors; otherwise of the output's."""


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
    """Identifies the adapter in slices from this step on; from 1, never reused."""
    version: str
    """Identifies the adapter in host memory."""
    pages: tuple[int, ...]
    """Device pages for its modules, in the order of the model's targets."""
    dropped: tuple[int, ...] = ()
    """Numbers of adapters that were evicted before this load."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence."""

    tokens: Sequence[int]
    """Token ids, at least one."""
    start: int
    """Position of the first token; keys and values of all tokens before it are in the KV cache."""
    block_table: Sequence[int]
    """Blocks of positions 0 to start + len(tokens) - 1, possibly more."""
    draws: tuple[Draw, ...] = ()
    """Without drafts all are from the logits of the last token: none in the middle of a context, at the end of a prompt
    one for each sequence that shares it, otherwise one. With drafts one for each of the last 1 + `drafts` tokens."""
    follows: int | None = None
    """Set while the last token is still being sampled: index of its draw in the step launched before this one. Its id
    in `tokens` is then a placeholder, and the draws' `output` lacks it."""
    drafts: int = 0
    """Number of draft tokens at the end of `tokens`."""
    scored: Scored | None = None
    kept: tuple[Kept, ...] = ()
    adapter_slot: int = 0
    """Number of the LoRA adapter; 0: none."""
    virtual: VirtualTokens | None = None
    """Table rows and images for ids beyond the vocabulary; None: `tokens` has no such ids."""
    positions: Positions | None = None
    """Positions for the rotary embedding; None: the tokens' indexes."""
    separate: bool = False
    """Compute each token with the same bits as in a step that computes no other token of its sequence."""

    @property
    def rows(self) -> list[range]:
        """Indexes in `tokens` of the rows that are needed in addition to the draws': for `scored`, then for `kept`."""
        ranges = []
        if self.scored is not None:
            first = self.scored.start - self.start
            ranges.append(range(first, first + len(self.scored.tokens)))
        for kept in self.kept:
            first = kept.start - self.start
            ranges.append(range(first, first + kept.count))
        return ranges


class MoveKind(Enum):
    """Between which pools a move copies, and when."""

    COPY = "copy"
    """Within the device: a forked sequence gets its own copy of a partly filled block."""
    OFFLOAD = "offload"
    """Device to host: the content of an evicted block stays in the prefix cache."""
    ONLOAD = "onload"
    """Host to device."""
    SAVE = "save"
    """Device to host: a copy of a full block, which stays on the device. Other moves of the same step come first, and
    write neither block."""

    @property
    def from_host(self) -> bool:
        return self is MoveKind.ONLOAD

    @property
    def to_host(self) -> bool:
        return self is MoveKind.OFFLOAD or self is MoveKind.SAVE


class Content(NamedTuple):
    """The content of a full block, as the prefix cache looks it up."""

    hash: bytes
    """Hash of the tokens, of the prompt table rows and images among them, and of the previous block's hash."""
    tokens: tuple[int, ...]
    parent: bytes | None = None
    """Hash of the previous block; None: there is none."""
    adapter: str = ""
    """Version of the LoRA adapter with which it was computed."""


class Move(NamedTuple):
    """Copies the content of one block, in all layers, from block `source` to block `target`."""

    kind: MoveKind
    source: int
    target: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """Computed in this order: moves, one after the other (a later one may read what an earlier one wrote), loads,
    slices."""

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
    """The guide allows no token here: the sequence ends with the tokens before. `token` is then meaningless."""
    best: Sequence[tuple[int, float]] = ()
    """For a beam: at most `Draw.candidates` possible tokens with their log-probabilities after all edits, the best
    first. `token` is then meaningless."""
    postponed: bool = False
    """The sequence's guide is not ready: prepare the request, then sample again. `token` is then meaningless."""

    @property
    def has_token(self) -> bool:
        """Whether a token was sampled."""
        return self.fault is None and not (self.complete or self.best or self.postponed)


class DeviceLostError(RuntimeError):
    """The device has failed irrecoverably: no later step of this process can succeed."""
