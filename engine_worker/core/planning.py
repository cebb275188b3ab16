"""Turns a schedule into the step that the runner computes, and launches it."""

from collections import abc

import msgspec
from msgspec.structs import replace

from engine_worker.core.tensors import kept_rows
from engine_worker.protocol import Launched, Runner
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.sequence import Sequence
from engine_worker.speculative.drafting import Drafting
from engine_worker.step import AdapterLoad, Draw, Drawn, Kept, KeptRows, Move, Scored, Slice, Step

UNKNOWN_TOKEN = (0,)
"""The tokens of a slice whose one token is still being drawn; the runner fills it in."""


class StepEntry(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. No cycle leads through it."""

    sequence: Sequence
    num_tokens: int
    """Tokens whose keys and values are computed, guesses included."""
    samplers: tuple[Sequence, ...]
    """The sequences that draw a token from the logits of the last one: none in the middle of a context; at the end of a
    prompt also those that await it."""
    drafts: abc.Sequence[int] = ()
    """Guesses of the next tokens; then the sequence is the only sampler, and draws once more for each of them."""
    scored: Scored | None = None
    """See `Slice`."""
    kept: tuple[Kept, ...] = ()
    """See `Slice`."""


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step whose results have not been collected."""

    schedule: Schedule
    entries: list[StepEntry]
    num_draws: int
    moves: tuple[Move, ...]
    loads: tuple[AdapterLoad, ...]
    launched: Launched | Exception
    num_drafted: int
    """Tokens, of all its sequences."""
    has_proposals: bool
    """Whether the caller's distribution decides about one of its draws."""
    start: float
    """When its planning began, in seconds on the engine's clock."""
    kept: tuple[Kept, ...] = ()
    """Of all entries."""

    @classmethod
    def launch(
        cls,
        runner: Runner,
        schedule: Schedule,
        drafting: Drafting,
        before: Step,
        start: float,
        *,
        idle: bool = True,
    ) -> "InFlightStep":
        """`before`: what precedes the slices. `idle`: no step is in flight. A step that cannot be launched raises in
        `collect`, as one that fails later does. Raises DeviceLostError if the draft model has failed, and with it the
        device."""
        moves, loads, failed = before.moves, before.loads, None
        if moves and idle and drafting.asks_model(schedule):
            # The draft model computes in these blocks before the step does.
            before, failed = replace(before, moves=()), _move(runner, moves)
        step = plan(schedule, drafting, idle=idle and failed is None)
        slices = _with_positions(step.entries, step.slices) if runner.image_rows else step.slices
        launched = failed or _launch(runner, Step(tuple(slices), before.moves, loads))
        return cls(
            schedule,
            step.entries,
            step.num_draws,
            moves,
            loads,
            launched,
            step.num_drafted,
            step.has_proposals,
            start,
            tuple(step.kept),
        )

    @property
    def decides_next(self) -> bool:
        """Whether the next step cannot be planned without its results: sequences that await a prompt get their first
        token from it, it has drafts, or whether the caller's draft is followed decides how the next token is drawn."""
        return self.num_drafted > 0 or self.has_proposals or any(len(entry.samplers) > 1 for entry in self._context)

    @property
    def _context(self) -> list[StepEntry]:
        return self.entries[len(self.schedule.generation) :]

    def collect(self) -> "StepResults":
        """Wait for the results. Raises whatever the runner raises, RuntimeError on a wrong count."""
        if isinstance(self.launched, Exception):
            raise self.launched
        drawn = self.launched.collect()
        if len(drawn) != self.num_draws:
            raise RuntimeError(f"the runner returned {len(drawn)} tokens for {self.num_draws} draws")
        # Only prompts have any.
        scored = [entry for entry in self._context if entry.scored is not None] if self.schedule.context else []
        logprobs = list(zip(scored, self.launched.prompt_logprobs(), strict=True)) if scored else []
        tensors = self._tensors(self.launched) if self.kept else []
        return StepResults(drawn, logprobs, tensors, self.launched.missing_adapters())

    def _tensors(self, launched: Launched) -> "list[tuple[StepEntry, list[list[KeptRows]]]]":
        rows = launched.kept_rows()
        if len(rows) != len(self.kept):
            raise RuntimeError(f"the runner returned {len(rows)} tensors for {len(self.kept)}")
        found = iter(rows)
        return [(entry, [next(found) for _ in entry.kept]) for entry in self.entries if entry.kept]


def _move(runner: Runner, moves: tuple[Move, ...]) -> Exception | None:
    """Why that failed."""
    try:
        runner.launch(Step((), moves)).collect()
    except Exception as error:  # noqa: BLE001 - as in `_launch`
        return error
    return None


def _launch(runner: Runner, step: Step) -> Launched | Exception:
    try:
        return runner.launch(step)
    except Exception as error:  # noqa: BLE001 - only this step's sequences fail, and only once their turn comes
        return error


class StepResults(msgspec.Struct, frozen=True):
    drawn: list[Drawn]
    """One per draw."""
    prompt_logprobs: list[tuple[StepEntry, bytes]]
    """Of the entries with `scored`."""
    tensors: list[tuple[StepEntry, list[list[KeptRows]]]]
    """Of the entries with `kept`: the rows of each."""
    missing: abc.Mapping[int, str]
    """See `Launched.missing_adapters`."""


class StepPlan(msgspec.Struct, frozen=True):
    entries: list[StepEntry]
    """Generation first."""
    slices: list[Slice]
    """One per entry."""
    num_draws: int
    """In the order of the entries' samplers."""
    num_drafted: int
    has_proposals: bool
    kept: list[Kept]
    """Of all entries."""


def _with_positions(entries: list[StepEntry], slices: list[Slice]) -> list[Slice]:
    """With those of requests that have images in grids."""
    # Beside `plan`, so that models without images pay nothing.
    positions = [entry.sequence.request.positions for entry in entries]
    if not any(positions):
        return slices
    pairs = zip(slices, positions, strict=True)
    return [part if found is None else replace(part, positions=found) for part, found in pairs]


def plan(schedule: Schedule, drafting: Drafting, *, idle: bool = True) -> StepPlan:
    """`idle`: see `Drafting.propose`. Marks what will be computed as in flight and what will be drawn as promised."""
    # For every sequence in every step: one pass, few calls and few objects.
    entries: list[StepEntry] = []
    slices: list[Slice] = []
    wanted: list[Kept] = []
    draw = num_drafted = 0
    proposing = False
    proposed = drafting.propose(schedule, idle=idle)
    for sequence in schedule.generation:
        request = sequence.request
        if proposed and (drafts := proposed.get(sequence)):
            entries.append(StepEntry(sequence, 1 + len(drafts), (sequence,), drafts))
            slices.append(_drafted_slice(sequence, drafts))
            sequence.num_inflight += len(drafts)
            sequence.expect(draw)
            draw += len(drafts)
            num_drafted += len(drafts)
        else:
            kept = kept_rows(sequence, 1) if request.has_tensors else ()
            wanted += kept
            entries.append(StepEntry(sequence, 1, (sequence,), (), None, kept))
            slices.append(_next_slice(sequence, kept))
            if request.search is None:
                sequence.expect(draw)
            else:
                sequence.due = False
        sequence.num_inflight += 1
        draw += 1
        if request.proposals is not None:
            proposing |= _proposes(slices[-1])
    for chunk in schedule.context:
        sequence, num_tokens = chunk
        samplers = _samplers(chunk)
        scored = _scored(sequence, num_tokens) if sequence.request.scoring else None
        kept = kept_rows(sequence, num_tokens) if sequence.request.has_tensors else ()
        wanted += kept
        entries.append(StepEntry(sequence, num_tokens, samplers, scored=scored, kept=kept))
        slices.append(_slice(sequence, num_tokens, samplers, scored, kept))
        # After the slice was made, which starts where the previous step ends.
        sequence.num_inflight += num_tokens
        for sampler in samplers:
            _expect(sampler, draw)
            draw += 1
        if sequence.request.proposals is not None:
            proposing |= _proposes(slices[-1])
    return StepPlan(entries, slices, draw, num_drafted, proposing, wanted)


def _proposes(part: Slice) -> bool:
    return any(draw.proposal is not None for draw in part.draws)


def _expect(sequence: Sequence, draw: int) -> None:
    if sequence.request.search is None:
        sequence.expect(draw)
    else:
        sequence.due = False


def _samplers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    # In the middle of a context there is nothing to draw.
    if chunk.num_tokens < sequence.num_pending:
        return ()
    return (sequence,) if sequence.output else (sequence, *sequence.request.awaiting())


def _scored(sequence: Sequence, num_tokens: int) -> Scored | None:
    """What of its prompt's log-probabilities the next `num_tokens` tokens give that has not been given."""
    request = sequence.request
    start = max(sequence.num_scheduled, request.num_scored)
    end = min(sequence.num_scheduled + num_tokens, request.num_prompt - 1)
    if start >= end:
        return None
    return Scored(start, request.spec.prompt[start + 1 : end + 1], request.spec.prompt_logprobs or 0)


def _next_slice(sequence: Sequence, kept: tuple[Kept, ...]) -> Slice:
    """Its newest token, the only one that is pending."""
    draws, adapter = (draw_after(sequence),), sequence.adapter
    start, blocks = sequence.num_computed + sequence.num_inflight, sequence.blocks
    # Fields by position, which is faster: this runs for every sequence in every step.
    if sequence.num_promised:
        return Slice(UNKNOWN_TOKEN, start, blocks, draws, sequence.promise, 0, None, kept, adapter)
    return Slice(sequence.output[-1:], start, blocks, draws, None, 0, None, kept, adapter)


def _slice(
    sequence: Sequence,
    num_tokens: int,
    samplers: tuple[Sequence, ...],
    scored: Scored | None,
    kept: tuple[Kept, ...],
) -> Slice:
    if sequence.num_promised:
        # The promised token is drawn from the logits of the token before it, so everything before it is computed or
        # in flight.
        return _next_slice(sequence, kept)
    start = sequence.num_scheduled
    tokens = sequence.tokens_between(start, start + num_tokens)
    virtual, adapter = sequence.request.virtual, sequence.adapter
    if virtual is not None and not virtual.occur(tokens):
        virtual = None
    draws = tuple(map(draw_after, samplers))
    return Slice(tokens, start, sequence.blocks, draws, scored=scored, kept=kept, adapter=adapter, virtual=virtual)


def _drafted_slice(sequence: Sequence, drafts: abc.Sequence[int]) -> Slice:
    """The newest token, which is known, and the guesses behind it."""
    start = sequence.num_computed
    draws = tuple(draw_after(sequence, drafts[:count]) for count in range(len(drafts) + 1))
    tokens, adapter = (sequence.output[-1], *drafts), sequence.adapter
    return Slice(tokens, start, sequence.blocks, draws, drafts=len(drafts), adapter=adapter)


def draw_after(sequence: Sequence, drafted: abc.Sequence[int] = ()) -> Draw:
    """The draw of its next token, if these guesses come before."""
    request = sequence.request
    spec, position = request.spec, sequence.num_tokens - request.num_prompt + len(drafted)
    banned = request.banned if request.banned and position < spec.stopping.min_tokens else ()
    candidates = 0 if request.search is None else request.search.num_candidates
    draw = Draw(spec.sampling, sequence.index, position, sequence.output, sequence.program, banned, drafted, candidates)
    if request.proposals is None or sequence.num_promised:
        # A token is promised while the next one is planned only if it was drawn plainly: the draft is over.
        return draw
    return replace(draw, proposal=request.proposals.after(sequence.output, drafted))
