"""The engine's state of a sequence.

A sequence has no context phase and no generation phase: its first `num_computed` tokens have keys and values in its
blocks, and each step computes more of its tokens. So chunked context, prefix reuse, preemption and resuming need no
special cases.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from engine_worker.speculative.drafter import Drafter
from engine_worker.step import SequenceProgram
from sluice.wire.errors import FinishReason
from sluice.wire.rows import Times

if TYPE_CHECKING:
    from engine_worker.request import Request

NO_LIMIT = 1 << 62
"""No limit on a number of tokens: more than any sequence reaches."""


class State(Enum):
    AWAITING = "awaiting"
    """Does not compete for memory yet: another sequence of its request computes their prompt, its request is being
    prepared, or its beam search waits for another beam."""
    WAITING = "waiting"
    """Holds no blocks: it has not had any, or a failed step has invalidated them."""
    RUNNING = "running"
    """Holds blocks."""
    PREEMPTED = "preempted"
    """Its blocks were released to make room; it will compute its tokens again."""
    ENDED = "ended"
    """Its terminal row is among the responses."""


class Content(NamedTuple):
    """The content of a full block, as the prefix cache looks it up."""

    hash: bytes
    """Hash of the tokens, of the prompt table rows and images among them, and of the previous block's hash."""
    tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One sampled continuation. Fields from `blocks` on are written by KvCacheManager only."""

    request: "Request"
    index: int
    """Index within its request, from 0."""
    state: State
    order: tuple[float, int, int]
    """Sort key (place in line, arrival number, index): the lowest is served first and preempted last. Unique."""
    num_tokens: int
    """Prompt and output tokens, promised ones included."""
    program: SequenceProgram | None = None
    """See `Runner.programs`."""
    drafter: Drafter | None = None
    output: list[int] = field(default_factory=list)
    """Known output tokens."""
    num_resumed: int = 0
    """Output tokens that came with the request: an earlier attempt sampled them."""
    first_token_at: float | None = None
    num_inflight: int = 0
    """Tokens that in-flight steps compute; they follow the computed ones."""
    num_promised: int = 0
    """Output tokens that in-flight steps sample: counted in `num_tokens`, but not known yet."""
    promise: int = 0
    """Index of the draw that yields the last promised token, in the latest of those steps."""
    due: bool = True
    """Whether the next step may include it. False for a beam from its draw until its search has advanced, and while
    there is no room for the tensors of its next token."""
    allowed: int = NO_LIMIT
    """Leading tokens that may be computed: there is room for their tensors."""
    num_rows: int = 0
    """Rows of its output's tensors that are among the responses."""
    forced: int | None = None
    """The last token of a complete resumed sequence whose row of tensors is missing. The engine computes that row by
    sampling the token again, and keeps this token instead of the sampled one."""
    best: abc.Sequence[tuple[int, float]] | None = None
    """The candidates that a beam has delivered in this round; None: it has not."""

    blocks: list[int] = field(default_factory=list)
    """Block table: block i holds positions from i * tokens_per_block on. Empty: holds no memory."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in `blocks`."""
    num_draft_computed: int = 0
    """Leading tokens whose keys and values of the draft model are in `blocks`: at most `num_computed`."""
    first_block: int = 0
    """Index of the first block that it holds; earlier entries are before the attention window and are never read."""
    num_found: int = 0
    """Leading blocks that were found in the prefix cache."""
    num_placed: int = 0
    """Leading tokens that its blocks have room for."""
    chain: list[Content] = field(default_factory=list)
    """Contents of its leading full blocks, hashed on demand."""
    adapter: int = 0
    """Number of its LoRA adapter on the device, held as long as its blocks; 0: none."""
    awaited: bytes | None = None
    """Hash of the block that another sequence is computing and this one waits for, as of the last check."""

    @property
    def num_pending(self) -> int:
        """Tokens neither computed nor in flight, which the next draw needs; at least 1 until the sequence ends."""
        return self.num_tokens - self.num_computed - self.num_inflight

    @property
    def num_scheduled(self) -> int:
        """Leading tokens that are computed or in flight: where its next slice starts."""
        return self.num_computed + self.num_inflight

    @property
    def num_alike(self) -> int:
        """Pending tokens that one slice may contain: all of them or, with `Request.recompute`, those of the prompt and
        afterwards that many generated ones."""
        recompute = self.request.recompute
        if recompute is None:
            return self.num_pending
        rest = self.request.num_prompt - self.num_scheduled
        return min(self.num_pending, rest if rest > 0 else recompute.tokens)

    @property
    def num_recompute_steps(self) -> int:
        """Steps that its pending generated tokens take, at least, after those of its prompt."""
        recompute = self.request.recompute
        if recompute is None:
            return 0
        return -(-(self.num_tokens - max(self.num_scheduled, self.request.num_prompt)) // recompute.tokens)

    @property
    def num_ready(self) -> int:
        """Pending tokens that its next slice may contain: `num_alike`, unless the attention window limits its blocks or
        the room for tensors its rows."""
        ready = min(self.num_tokens, self.num_placed, self.allowed) - self.num_computed - self.num_inflight
        return min(ready, self.num_alike)

    @property
    def first_unsent(self) -> int:
        """Position of the first row of tensors that the client has requested and that was not sent; NO_LIMIT if there
        is none."""
        request, first = self.request, NO_LIMIT
        tensors = request.tensors
        if tensors.output:
            first = request.num_prompt - 1 + self.num_rows
        if tensors.context and request.num_context_rows < request.num_prompt and self is request.prompt_rows_owner:
            first = min(first, request.num_context_rows)
        return first

    @property
    def num_reusable(self) -> int:
        """Leading tokens that need not be computed if they are cached: up to the first whose logits or rows of tensors
        are needed, which is the last token at the latest."""
        request = self.request
        reusable = request.num_scored if request.scoring else self.num_tokens - 1
        return min(reusable, self.first_unsent) if request.has_tensors else reusable

    @property
    def gated(self) -> bool:
        """Whether it waits for room for its tensors. Reuse of cached blocks may have moved it beyond `allowed`."""
        return self.allowed <= self.num_scheduled

    @property
    def generating(self) -> bool:
        """Whether its newest output token, known or promised, is the only pending one."""
        tokens = self.num_tokens
        return tokens == self.num_computed + self.num_inflight + 1 and tokens > self.request.num_prompt

    @property
    def num_drawn(self) -> int:
        """Output tokens sampled by this attempt."""
        return len(self.output) - self.num_resumed

    @property
    def num_known(self) -> int:
        """Prompt and output tokens without promised ones."""
        return self.num_tokens - self.num_promised

    @property
    def complete(self) -> bool:
        """Whether its last token, by max_tokens, is known or promised: no further step includes it."""
        return self.num_tokens >= self.request.max_tokens

    @property
    def runnable(self) -> bool:
        """Whether the next step can include it: it is due and not complete, and its blocks have room for its next
        token."""
        # Spelled out instead of `complete` and `num_scheduled`: called for every sequence in every step.
        scheduled = self.num_computed + self.num_inflight
        return self.due and self.num_tokens < self.request.max_tokens and scheduled < self.num_placed

    def expect(self, draw: int) -> None:
        """Promise the next token: draw number `draw` of the step being launched samples it."""
        self.num_promised += 1
        self.promise = draw
        self.num_tokens += 1

    def append(self, token: int) -> None:
        """Add its next token, promised or not."""
        self.output.append(token)
        if self.num_promised:
            self.num_promised -= 1
        else:
            self.num_tokens += 1

    def append_forced(self) -> None:
        """Add `forced`, if it is set."""
        if self.forced is not None:
            self.append(self.forced)
            self.forced = None

    def drop_promise(self) -> None:
        """Drop the promised token, because its step failed or was discarded: the next step samples it again."""
        if self.request.search is not None:
            self.due = True
            return
        self.num_promised -= 1
        self.num_tokens -= 1

    def fork(self, index: int) -> "Sequence":
        """A new beam with the same tokens, without memory."""
        return Sequence(
            self.request,
            index,
            State.WAITING,
            (*self.order[:2], index),
            self.num_tokens,
            program=None if self.program is None else self.program.fork(),
            output=self.output.copy(),
            first_token_at=self.first_token_at,
            chain=self.chain.copy(),
        )

    def tokens_between(self, start: int, end: int) -> abc.Sequence[int]:
        """Token ids at positions `start` to `end` - 1 of prompt plus output."""
        prompt, size = self.request.spec.prompt, self.request.num_prompt
        if start >= size:
            return self.output[start - size : end - size]
        if end <= size:
            return prompt[start:end]
        return prompt[start:] + self.output[: end - size]

    def finish_reason(self) -> FinishReason:
        """Why the newest output token ends the sequence; RUNNING if it does not."""
        return self.request.spec.stopping.finish_reason(self.output[-1], len(self.output))

    def times(self, now: float) -> Times:
        """Seconds queued, from the first step to the first token, and since then."""
        scheduled = now if self.request.scheduled_at is None else self.request.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Times(scheduled - self.request.arrived_at, first - scheduled, now - first)


IN_ORDER = attrgetter("order")
"""Sort key of sequences."""
