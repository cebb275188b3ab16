"""A request and its sequences as the engine holds them: plain state.

A sequence has no context phase and no generation phase: its first `num_computed` tokens have keys and values in its
blocks, and every step computes more of the tokens that it has. So chunked context, prefix reuse, preemption and
resuming need no code of their own.
"""

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import attrgetter
from typing import NamedTuple

from engine_worker.beams import BeamSearch
from engine_worker.positions import Positions
from engine_worker.speculative.drafter import Drafter
from engine_worker.speculative.lookup import Lookup
from engine_worker.speculative.proposals import Proposals
from engine_worker.step import SequenceProgram
from sluice.ring.errors import FinishReason
from sluice.ring.params import RetentionParams, place_in_line
from sluice.ring.rows import Open, Times
from sluice.ring.tables import VirtualTokens
from sluice.ring.wire import Submit

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


class Request:
    """What was submitted, and those of its n sequences that did not end in an earlier attempt.

    The first sequence without output computes the prompt; the others without output await it. A resumed sequence brings
    output and is treated like one that was preempted after it.
    """

    def __init__(
        self,
        spec: Submit,
        root: bytes,
        number: int,
        now: float,
        aging_seconds: float = 0.0,
        programs: abc.Sequence[SequenceProgram | None] | None = None,
        max_drafts: int = 0,
        virtual: VirtualTokens | None = None,
        positions: Positions | None = None,
    ) -> None:
        """`root`: parent of the first block's hash. `number`: of the arrival. `aging_seconds`: see `place_in_line`.
        `programs`: from `Runner.programs`; None: the request needs none. `max_drafts`: tokens that may be drafted per
        sequence and step. `virtual`: of its tables and images. `positions`: see `Slice`."""
        self.spec = spec
        self.root = root
        self.virtual = virtual
        self.positions = positions
        self.num_prompt = len(spec.prompt)
        self.max_tokens = self.num_prompt + spec.stopping.max_tokens
        """Of prompt plus output."""
        self.banned = spec.stopping.eos_token_ids + spec.stopping.stop_token_ids if spec.stopping.min_tokens else ()
        """Token ids that may not be drawn before min_tokens."""
        self.stops = frozenset(spec.stopping.eos_token_ids + spec.stopping.stop_token_ids)
        """Token ids that may end a sequence."""
        self.retention = spec.retention if spec.retention != RetentionParams() else None
        """None: the request does not say how long to keep its blocks."""
        self.arrived_at = now
        self.max_drafts = max_drafts
        self.lookup: Lookup | None = None
        """Of what is known before the output; made with the first drafter, shared by all."""
        self.proposals = Proposals.of(spec)
        """None: all tokens are drawn plainly."""
        self.adapter = None if spec.adapter is None else spec.adapter.version
        """Version of its LoRA adapter."""
        self.has_tensors = bool(spec.tensors)
        self.num_scored = 0
        """Of the prompt's log-probabilities, how many are among the responses."""
        self.num_context_rows = spec.tensors.context_rows
        """Of the prompt's tensors, how many rows are among the responses."""
        self.deadline = inf if spec.time_limit is None else now + spec.time_limit
        beams = spec.sampling.beam_search
        self.search = None if beams is None else BeamSearch(beams, spec.stopping, spec.sampling.logprobs or 0)
        """None: its tokens are sampled. Else `sequences` are the live beams, the best first; a later attempt searches
        again from the prompt, and finds the same."""
        self.opened = False
        """Whether its Open is among the responses."""
        self.begun = False
        """Whether one of its sequences has held memory."""
        self.scheduled_at: float | None = None
        """When its first step was scheduled."""
        self.first_iteration = 0
        """Number of that step."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at its first step."""
        self.last_token_at: float | None = None
        self.preemptions = 0
        self.blocks_allocated = 0
        self.blocks_reused = 0
        """Found in the prefix cache instead of allocated."""
        self.blocks_missed = 0
        """Full prompt blocks looked for in the prefix cache and not found."""
        place = place_in_line(spec.priority, now, aging_seconds)
        programs = programs or [None] * spec.n
        if self.search is not None:
            first = Sequence(self, 0, State.AWAITING, (place, number, 0), self.num_prompt, programs[0])
            self.sequences: tuple[Sequence, ...] = (first,)
        else:
            self.sequences = tuple(
                self._sequence(index, (place, number, index), programs[index]) for index in remaining(spec)
            )
        for computes_prompt in self.awaiting()[:1]:
            computes_prompt.state = State.WAITING
        self.num_live = len(self.sequences)
        """Sequences that have not ended."""

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still wanted; then none of its sequences has output."""
        return self.spec.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def keeper(self) -> Sequence | None:
        """The sequence that keeps the prompt's rows of tensors."""
        return next((sequence for sequence in self.sequences if sequence.state is not State.ENDED), None)

    def awaiting(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is State.AWAITING]

    def _sequence(self, index: int, order: tuple[float, int, int], program: SequenceProgram | None) -> Sequence:
        output = list(self.spec.resume.get(index, ()))
        forced = output.pop() if self._lacks_rows(index, output) else None
        state = State.WAITING if output else State.AWAITING
        found = Sequence(self, index, state, order, self.num_prompt + len(output), program, None, output, len(output))
        found.num_rows, found.forced = self.spec.tensors.output_rows.get(index, 0), forced
        return found

    def _lacks_rows(self, index: int, output: abc.Sequence[int]) -> bool:
        """Whether a resumed sequence is complete, and rows of tensors are not."""
        tensors, stopping = self.spec.tensors, self.spec.stopping
        if not output or not tensors or stopping.finish_reason(output[-1], len(output)) is FinishReason.RUNNING:
            return False
        missing = bool(tensors.output) and tensors.output_rows.get(index, 0) < len(output)
        return missing or (bool(tensors.context) and tensors.context_rows < self.num_prompt)


def remaining(spec: Submit) -> list[int]:
    """Indexes of the sequences that did not end in an earlier attempt."""
    ended = set(spec.ended)
    return [index for index in range(spec.n) if index not in ended]


def opening(spec: Submit, cached_tokens: int = 0, queue: float = 0.0) -> Open:
    """The request's Open. `queue`: seconds that it waited."""
    return Open(
        request=spec.request,
        attempt=spec.attempt,
        n=spec.n,
        text=spec.text,
        router=spec.router,
        prompt_tokens=len(spec.prompt),
        cached_tokens=cached_tokens,
        queue=queue,
        resume=spec.resume,
        ended=spec.ended,
    )
