"""A sequence of a request as the engine holds it: plain state.

It has no context phase and no generation phase: its first `num_computed` tokens have keys and values in its blocks, and
every step computes more of the tokens that it has. So chunked context, prefix reuse, preemption and resuming need no
code of their own.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from engine_worker.speculative.drafter import Drafter
from engine_worker.step import SequenceProgram
from sluice.ring.errors import FinishReason
from sluice.ring.rows import Times

if TYPE_CHECKING:
    from engine_worker.request import Request

NO_LIMIT = 1 << 62


class State(Enum):
    AWAITING = "awaiting"
    """Another sequence of its request computes their prompt, or the request waits for something else; this one competes
    for no memory yet."""
    WAITING = "waiting"
    """Holds no blocks: never did, or a failed step has invalidated them."""
    RUNNING = "running"
    """Holds blocks."""
    PREEMPTED = "preempted"
    """Gave its blocks back to make room and will compute its tokens again."""
    ENDED = "ended"
    """Its terminal row is among the responses."""


class Content(NamedTuple):
    """What a full block holds: the key under which the prefix cache finds it."""

    hash: bytes
    """Hash of the tokens, of the tables that they address, and of the previous block's hash."""
    tokens: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One sampled continuation. Fields from `blocks` on are written by KvCacheManager only."""

    request: "Request"
    index: int
    """Within its request, from 0."""
    state: State
    order: tuple[float, int, int]
    """Sort key (place in line, arrival, index): the lowest is served first and preempted last."""
    num_tokens: int
    """Prompt and output, including promised tokens."""
    program: SequenceProgram | None = None
    """See `Runner.programs`."""
    drafter: Drafter | None = None
    output: list[int] = field(default_factory=list)
    """Known output tokens."""
    num_resumed: int = 0
    """Output tokens that came with the request, drawn by an earlier attempt."""
    first_token_at: float | None = None
    num_inflight: int = 0
    """Tokens that in-flight steps compute; they follow the computed ones."""
    num_promised: int = 0
    """Output tokens that in-flight steps draw: counted in `num_tokens`, not yet known."""
    promise: int = 0
    """Index of the draw, in the latest of those steps, that yields the last promised token."""
    due: bool = True
    """False for a beam that has drawn, or is drawing, until it gets its next token; and while there is no room for the
    tensors that its next token brings."""
    allowed: int = NO_LIMIT
    """Leading tokens that may be computed, for there is room for the tensors that they bring."""
    num_rows: int = 0
    """Of its output's tensors, how many rows are among the responses."""
    forced: int | None = None
    """Its last token, if that has come from an earlier attempt without its row of tensors: it is drawn again, and is
    this one whatever is drawn."""
    best: abc.Sequence[tuple[int, float]] | None = None
    """The candidates that a beam has delivered, until the next round."""

    blocks: list[int] = field(default_factory=list)
    """Block table: block i holds positions from i * tokens_per_block on. Empty: holds no memory."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in `blocks`."""
    num_draft_computed: int = 0
    """The same of the draft model, which may be behind."""
    first_block: int = 0
    """Index of the first block it holds; earlier entries lie behind the attention window and are never read."""
    num_found: int = 0
    """Leading blocks that came from the prefix cache."""
    num_placed: int = 0
    """Leading tokens that its blocks have room for."""
    chain: list[Content] = field(default_factory=list)
    """Its leading full blocks, hashed on demand."""
    adapter: int = 0
    """Number of its LoRA adapter on the device, which it holds beside its blocks; 0: none."""
    awaited: bytes | None = None
    """Hash of the block that it waits for another sequence to compute, as of the last check."""

    @property
    def num_pending(self) -> int:
        """Tokens neither computed nor in flight that the next draw needs; at least 1 until the sequence ends."""
        return self.num_tokens - self.num_computed - self.num_inflight

    @property
    def num_scheduled(self) -> int:
        """Leading tokens that are computed or in flight: where its next slice starts."""
        return self.num_computed + self.num_inflight

    @property
    def num_ready(self) -> int:
        """Pending tokens that may be computed: all of them, unless an attention window bounds its blocks, or the room
        for tensors its rows."""
        return min(self.num_tokens, self.num_placed, self.allowed) - self.num_computed - self.num_inflight

    @property
    def first_wanted(self) -> int:
        """Position of the first row of tensors that is wanted and was not sent; NO_LIMIT: none is."""
        request, found = self.request, NO_LIMIT
        tensors = request.spec.tensors
        if tensors.output:
            found = request.num_prompt - 1 + self.num_rows
        if tensors.context and request.num_context_rows < request.num_prompt and self is request.keeper:
            found = min(found, request.num_context_rows)
        return found

    @property
    def num_reusable(self) -> int:
        """Leading tokens that need not be computed if they are cached: not the last, nor those whose logits or rows are
        wanted."""
        request = self.request
        found = request.num_scored if request.scoring else self.num_tokens - 1
        return min(found, self.first_wanted) if request.has_tensors else found

    @property
    def gated(self) -> bool:
        """Whether it waits for room for its tensors; also if reuse of cached blocks has brought it there since."""
        return self.allowed <= self.num_scheduled

    @property
    def generating(self) -> bool:
        """Whether only its newest output token, known or promised, remains to be computed."""
        tokens = self.num_tokens
        return tokens == self.num_computed + self.num_inflight + 1 and tokens > self.request.num_prompt

    @property
    def num_drawn(self) -> int:
        """Output tokens drawn by this attempt."""
        return len(self.output) - self.num_resumed

    @property
    def num_known(self) -> int:
        """Prompt and known output tokens."""
        return self.num_tokens - self.num_promised

    @property
    def complete(self) -> bool:
        """Its last token is known or promised: nothing more of it is computed."""
        return self.num_tokens >= self.request.max_tokens

    @property
    def runnable(self) -> bool:
        """Whether the next step can include it: it is not complete, and its next token has room in its blocks."""
        # Spelled out instead of `complete` and `num_scheduled`: called for every sequence in every step.
        scheduled = self.num_computed + self.num_inflight
        return self.due and self.num_tokens < self.request.max_tokens and scheduled < self.num_placed

    def expect(self, draw: int) -> None:
        """Draw number `draw` of the step being launched yields its next token."""
        self.num_promised += 1
        self.promise = draw
        self.num_tokens += 1

    def append(self, token: int) -> None:
        """Its next token, promised or not."""
        self.output.append(token)
        if self.num_promised:
            self.num_promised -= 1
        else:
            self.num_tokens += 1

    def append_forced(self) -> None:
        """The token that it must end with, if any."""
        if self.forced is not None:
            self.append(self.forced)
            self.forced = None

    def drop_promise(self) -> None:
        """A promised token will not come: everything after the last known one is computed again."""
        if self.request.search is not None:
            self.due = True
            return
        self.num_promised -= 1
        self.num_tokens -= 1

    def fork(self, index: int) -> "Sequence":
        """Another beam with the same tokens; it holds no memory."""
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
        """Token ids at positions start to end - 1 of prompt plus output."""
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
        """Seconds queued, to the first token, and since."""
        scheduled = now if self.request.scheduled_at is None else self.request.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Times(scheduled - self.request.arrived_at, first - scheduled, now - first)


IN_ORDER = attrgetter("order")
