"""A request as the engine holds it, and its sequences: plain state.

A sequence has no context phase and no generation phase: its first `num_computed` tokens have keys and values in its
blocks, and every step lets it catch up with the tokens it has.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import attrgetter
from typing import NamedTuple

from sluice.ring.errors import FinishReason
from sluice.ring.params import RetentionParams, place_in_line
from sluice.ring.wire import Submit, Times


class State(Enum):
    """Where a sequence stands."""

    AWAITING = "awaiting"
    """Another sequence of its request computes the prompt for it; it asks for no memory yet."""
    WAITING = "waiting"
    """It holds no memory: it has not yet, or a failed step took what it ran on."""
    RUNNING = "running"
    """It holds blocks."""
    PAUSED = "paused"
    """It gave its blocks back for others and will compute its tokens again."""
    ENDED = "ended"
    """Its terminal is in the outbox."""


class Content(NamedTuple):
    """A full block of tokens and everything before them, by which it is found again."""

    hash: bytes
    """Of the tokens and the hash of the block before."""
    tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One sampled continuation. From `blocks` on it is the KV cache's to write."""

    request: "Request"
    index: int
    """In its request, from 0."""
    state: State
    order: tuple[float, int, int]
    """Who goes first: place in line, then arrival, then index. The least is served first and paused last."""
    num_tokens: int
    """Prompt and output so far, and the tokens that steps in flight will draw."""
    output: list[int] = field(default_factory=list)
    """The continuation so far; it grows by `append`."""
    num_resumed: int = 0
    """Of the output, what an earlier attempt had drawn."""
    first_token_at: float | None = None
    num_inflight: int = 0
    """Tokens that steps in flight compute; they follow the computed ones."""
    num_promised: int = 0
    """Tokens that steps in flight draw for it: counted, but not known yet."""
    promise: int = 0
    """Which draw of the latest of those steps brings the last of them."""

    blocks: list[int] = field(default_factory=list)
    """Block table: block i holds positions i * tokens_per_block and on. Empty: it holds no memory."""
    num_computed: int = 0
    """Tokens, from the first, whose keys and values are in `blocks`."""
    first_block: int = 0
    """Index of the first block that it holds; entries before that lie behind the attention window and mean nothing."""
    num_found: int = 0
    """Blocks, from the first, that were found and not filled by it."""
    num_placed: int = 0
    """Tokens, from the first, that its blocks have room for."""
    chain: list[Content] = field(default_factory=list)
    """Its first full blocks, as far as somebody asked for them."""
    awaited: bytes | None = None
    """Hash of the block that it waited for when it was last asked, for somebody computes it."""

    @property
    def num_pending(self) -> int:
        """Tokens that nobody computes yet and that have to be before the next can be drawn; at least 1 in a sequence
        that lives."""
        return self.num_tokens - self.num_computed - self.num_inflight

    @property
    def num_scheduled(self) -> int:
        """Tokens, from the first, that are computed or in flight: where its next slice starts."""
        return self.num_computed + self.num_inflight

    @property
    def num_ready(self) -> int:
        """Pending tokens that a step can compute: all but where an attention window bounds its blocks."""
        return min(self.num_tokens, self.num_placed) - self.num_computed - self.num_inflight

    @property
    def generating(self) -> bool:
        """Only its newest output token is to be computed, which a step in flight may still have to draw."""
        tokens = self.num_tokens
        return tokens == self.num_computed + self.num_inflight + 1 and tokens > self.request.num_prompt

    @property
    def num_drawn(self) -> int:
        """Output tokens that this attempt has drawn."""
        return len(self.output) - self.num_resumed

    @property
    def num_known(self) -> int:
        """Tokens that are there, in prompt and output."""
        return self.num_tokens - self.num_promised

    @property
    def complete(self) -> bool:
        """Its last token is there or just being drawn: nothing more of it is computed."""
        return self.num_tokens >= self.request.max_tokens

    @property
    def due(self) -> bool:
        """It can go into the next step: no step in flight draws its last token, and its next one has a place."""
        return self.num_tokens < self.request.max_tokens and self.num_computed + self.num_inflight < self.num_placed

    def expect(self, draw: int) -> None:
        """This draw of the step being launched will bring its next token."""
        self.num_promised += 1
        self.promise = draw
        self.num_tokens += 1

    def append(self, token: int) -> None:
        """Its next token."""
        self.output.append(token)
        if self.num_promised:
            self.num_promised -= 1
        else:
            self.num_tokens += 1

    def give_up(self) -> None:
        """A promised token will not come after all: everything since the last known one is computed again."""
        self.num_promised -= 1
        self.num_tokens -= 1

    def tokens_between(self, start: int, end: int) -> abc.Sequence[int]:
        """Token ids at positions start to end - 1 of prompt and output."""
        prompt, size = self.request.spec.prompt, self.request.num_prompt
        if start >= size:
            return self.output[start - size : end - size]
        if end <= size:
            return prompt[start:end]
        return prompt[start:] + self.output[: end - size]

    def finish_reason(self) -> FinishReason:
        """Why the newest output token ends the sequence; RUNNING if it does not.

        An end or stop token is output and a completion token as any other; the detokenizer decides whether to show it.
        """
        stopping = self.request.spec.stopping
        token, count = self.output[-1], len(self.output)
        if count > stopping.min_tokens:
            if token in stopping.eos_token_ids:
                return FinishReason.EOS
            if token in stopping.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count >= stopping.max_tokens else FinishReason.RUNNING

    def times(self, now: float) -> Times:
        """Where its time went until now."""
        scheduled = now if self.request.scheduled_at is None else self.request.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Times(scheduled - self.request.arrived_at, first - scheduled, now - first)


IN_ORDER = attrgetter("order")
"""Key of sequences: who goes first."""


class Request:
    """What was submitted, and those of its n sequences that have not ended in an earlier attempt.

    The first of those without a token computes the prompt; the others of those await that. One that resumes has tokens,
    and is as one that was paused after them.
    """

    __slots__ = (
        "arrived_at",
        "banned",
        "beam_width",
        "begun",
        "blocks_allocated",
        "blocks_missed",
        "blocks_reused",
        "cached_tokens",
        "deadline",
        "last_token_at",
        "max_tokens",
        "num_live",
        "num_prompt",
        "opened",
        "pauses",
        "retention",
        "root",
        "scheduled_at",
        "sequences",
        "spec",
        "stops",
    )

    def __init__(self, spec: Submit, root: bytes, number: int, now: float, aging_seconds: float = 0.0) -> None:
        """`root` starts its block hashes, `number` grows with each arrival, `now` is the engine's clock in seconds.

        `aging_seconds`: see `place_in_line`.
        """
        self.spec = spec
        self.root = root
        self.num_prompt = len(spec.prompt)
        self.max_tokens = self.num_prompt + spec.stopping.max_tokens
        """Prompt and output at their longest."""
        self.banned = spec.stopping.eos_token_ids + spec.stopping.stop_token_ids if spec.stopping.min_tokens else ()
        """Ids that may not come before min_tokens."""
        self.stops = frozenset(spec.stopping.eos_token_ids + spec.stopping.stop_token_ids)
        """Ids that may end a sequence."""
        self.retention = spec.retention if spec.retention != RetentionParams() else None
        """How eagerly its blocks are kept; None: it does not say."""
        self.arrived_at = now
        self.deadline = inf if spec.time_limit is None else now + spec.time_limit
        self.beam_width = 1
        """Beams of each of its sequences; in a step all are equal."""
        self.opened = False
        """Its stream is."""
        self.begun = False
        """One of its sequences has held memory."""
        self.scheduled_at: float | None = None
        """When its first step was scheduled."""
        self.cached_tokens = 0
        """Of its prompt, found in the cache at its first step."""
        self.last_token_at: float | None = None
        self.pauses = 0
        self.blocks_allocated = 0
        """KV blocks that were taken for it, newly filled."""
        self.blocks_reused = 0
        """KV blocks that were found in the cache instead."""
        self.blocks_missed = 0
        """Full blocks of its prompt that were looked for and not found."""
        place = place_in_line(spec.priority, now, aging_seconds)
        self.sequences = tuple(self._sequence(index, (place, number, index)) for index in remaining(spec))
        """By index."""
        for computes_prompt in self.awaiting()[:1]:
            computes_prompt.state = State.WAITING
        self.num_live = len(self.sequences)
        """Sequences that have not ended."""

    def awaiting(self) -> list[Sequence]:
        """Sequences that still await the prompt."""
        return [sequence for sequence in self.sequences if sequence.state is State.AWAITING]

    def _sequence(self, index: int, order: tuple[float, int, int]) -> Sequence:
        output = list(self.spec.resume.get(index, ()))
        state = State.WAITING if output else State.AWAITING
        return Sequence(self, index, state, order, self.num_prompt + len(output), output, len(output))


def remaining(spec: Submit) -> list[int]:
    """Indexes of the sequences that have not ended in an earlier attempt."""
    ended = set(spec.ended)
    return [index for index in range(spec.n) if index not in ended]
