"""The engine's state of a request and of its sequences.

A sequence has no context phase and no generation phase: its first `num_computed` tokens have keys and values in its
blocks, and each step computes more of its tokens. So chunked context, prefix reuse, preemption and resuming need no
special cases.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import attrgetter

from engine_worker.beams import BeamSearch
from engine_worker.positions import Positions
from engine_worker.recompute import Recompute
from engine_worker.speculative.drafter import Drafter
from engine_worker.speculative.lookup import Lookup
from engine_worker.speculative.proposals import Proposals
from engine_worker.step import NO_LIMIT, Content, SequenceRules
from sluice.wire.errors import FinishReason
from sluice.wire.params import place_in_line
from sluice.wire.requests import NO_EXTRAS, Submit
from sluice.wire.rows import Times
from sluice.wire.tables import VirtualTokens
from sluice.wire.tensors import NO_TENSORS


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
    rules: SequenceRules | None = None
    """See `Runner.logit_rules`."""
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
    adapter_slot: int = 0
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
        """Position of the first row of tensors that the client has requested and that was not sent; NO_LIMIT if all
        were sent."""
        request, tensors, first = self.request, self.request.tensors, NO_LIMIT
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
        """Promise the next token: draw number `draw` of the step being launched samples it. Of a beam the draw yields
        candidates, and no token is promised."""
        if self.request.search is not None:
            self.due = False
            return
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
            rules=None if self.rules is None else self.rules.fork(),
            output=self.output.copy(),
            first_token_at=self.first_token_at,
            chain=self.chain.copy(),
        )

    def tokens_between(self, start: int, end: int) -> abc.Sequence[int]:
        """Token ids at positions `start` to `end` - 1 of prompt plus output."""
        prompt, size = self.request.submit.prompt, self.request.num_prompt
        if start >= size:
            return self.output[start - size : end - size]
        if end <= size:
            return prompt[start:end]
        return prompt[start:] + self.output[: end - size]

    def finish_reason(self) -> FinishReason:
        """Why the newest output token ends the sequence; RUNNING if it does not."""
        return self.request.submit.stopping.finish_reason(self.output[-1], len(self.output))

    def times(self, now: float) -> Times:
        """Seconds queued, from the first step to the first token, and since then."""
        scheduled = now if self.request.scheduled_at is None else self.request.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Times(scheduled - self.request.arrived_at, first - scheduled, now - first)


IN_ORDER = attrgetter("order")
"""Sort key of sequences."""


class Request:
    """A submitted request with those of its n sequences that did not end in an earlier attempt.

    The first sequence without output computes the prompt; the others without output await it. A resumed sequence starts
    with output and is treated like one that was preempted after it.
    """

    def __init__(
        self,
        submit: Submit,
        root: bytes,
        number: int,
        now: float,
        aging_seconds: float = 0.0,
        rules: abc.Sequence[SequenceRules | None] | None = None,
        max_drafts: int = 0,
        virtual: VirtualTokens | None = None,
        positions: Positions | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`root`: parent hash of the first block. `number`: arrival number. `aging_seconds`: see `place_in_line`.
        `rules`: from `Runner.logit_rules`; None: the request needs none. `max_drafts`: limit on draft tokens per
        sequence and step. `virtual`: ids of its tables and images. `positions`: see `Slice`.
        `recompute`: None: generated tokens are computed again like those of the prompt."""
        self.submit = submit
        extras = self.extras = submit.extras or NO_EXTRAS
        self.root = root
        self.virtual = virtual
        self.positions = positions
        self.recompute = recompute
        self.num_prompt = len(submit.prompt)
        self.max_tokens = self.num_prompt + submit.stopping.max_tokens
        """Limit on prompt plus output of a sequence."""
        ends = submit.stopping.eos_token_ids + submit.stopping.stop_token_ids
        self.banned = ends if submit.stopping.min_tokens else ()
        """Token ids that must not be sampled before min_tokens."""
        self.stops = frozenset(ends)
        """Token ids that may end a sequence."""
        self.retention = extras.retention if extras.retention != NO_EXTRAS.retention else None
        """How long to keep its blocks; None: the default."""
        self.arrived_at = now
        self.max_drafts = max_drafts
        self.lookup: Lookup | None = None
        """Lookup over the prompt and the caller's draft; created with the first drafter, shared by all."""
        self.proposals = None if submit.extras is None else Proposals.of(extras.speculation, submit.sampling)
        """The caller's draft tokens with logits; None: plain sampling."""
        self.adapter_version = submit.adapter_version
        """Version of its LoRA adapter."""
        self.has_tensors = extras.tensors is not None
        self.tensors = NO_TENSORS if extras.tensors is None else extras.tensors
        self.num_scored = 0
        """Log-probabilities of the prompt that are among the responses."""
        self.num_context_rows = self.tensors.context_rows
        """Rows of the prompt's tensors that are among the responses."""
        self.deadline = inf if submit.time_limit is None else now + submit.time_limit
        beams = submit.sampling.beam_search
        self.search = None if beams is None else BeamSearch(beams, submit.stopping, submit.sampling.logprobs or 0)
        """Set for beam search: `sequences` are then the live beams, the best first. A later attempt starts the search
        again from the prompt, with the same result. None: tokens are sampled."""
        self.opened = False
        """Whether its Open is among the responses."""
        self.begun = False
        """Whether one of its sequences has held memory."""
        self.scheduled_at: float | None = None
        """When its first step was scheduled."""
        self.first_iteration = 0
        """Number of its first step."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at its first step."""
        self.last_token_at: float | None = None
        self.preemptions = 0
        self.blocks_allocated = 0
        self.blocks_reused = 0
        """Blocks found in the prefix cache instead of allocated."""
        self.blocks_missed = 0
        """Full prompt blocks that were looked up in the prefix cache and not found."""
        place = place_in_line(submit.priority, now, aging_seconds)
        rules = rules or [None] * submit.n
        if self.search is not None:
            first = Sequence(self, 0, State.AWAITING, (place, number, 0), self.num_prompt, rules[0])
            self.sequences: tuple[Sequence, ...] = (first,)
        else:
            self.sequences = tuple(
                self._sequence(index, (place, number, index), rules[index]) for index in submit.remaining
            )
        for computes_prompt in self.awaiting()[:1]:
            computes_prompt.state = State.WAITING
        self.num_live = len(self.sequences)
        """Sequences that have not ended."""

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still missing; then none of its sequences has output."""
        return self.extras.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def prompt_rows_owner(self) -> Sequence | None:
        """The sequence that keeps the rows of the prompt's tensors: the first that has not ended."""
        return next((sequence for sequence in self.sequences if sequence.state is not State.ENDED), None)

    def waiting(self) -> list[Sequence]:
        """Sequences that hold no blocks and compete for memory."""
        return [sequence for sequence in self.sequences if sequence.state is State.WAITING]

    def awaiting(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is State.AWAITING]

    def _sequence(self, index: int, order: tuple[float, int, int], rules: SequenceRules | None) -> Sequence:
        output = list(self.submit.resume.get(index, ()))
        forced = output.pop() if self._lacks_rows(index, output) else None
        state = State.WAITING if output else State.AWAITING
        num_tokens = self.num_prompt + len(output)
        sequence = Sequence(self, index, state, order, num_tokens, rules, None, output, len(output))
        sequence.num_rows, sequence.forced = self.tensors.output_rows.get(index, 0), forced
        return sequence

    def _lacks_rows(self, index: int, output: abc.Sequence[int]) -> bool:
        """Whether a resumed sequence is complete but rows of its tensors are missing."""
        tensors, stopping = self.tensors, self.submit.stopping
        if not output or not self.has_tensors:
            return False
        if stopping.finish_reason(output[-1], len(output)) is FinishReason.RUNNING:
            return False
        missing = bool(tensors.output) and tensors.output_rows.get(index, 0) < len(output)
        return missing or (bool(tensors.context) and tensors.context_rows < self.num_prompt)
