"""Turns a schedule into the step that the runner computes, and launches it."""

from collections import abc

import msgspec
from msgspec.structs import replace

from engine_worker.core.tensors import kept_rows
from engine_worker.protocol import Launched, Runner
from engine_worker.request import Sequence
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.speculative.drafting import Drafting
from engine_worker.step import Draw, Drawn, Kept, KeptRows, Move, Scored, Slice, Step

UNKNOWN_TOKEN = (0,)
"""The tokens of a slice whose only token is still being sampled; the runner fills it in."""


class StepEntry(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step."""

    sequence: Sequence
    num_tokens: int
    """Tokens whose keys and values are computed, draft tokens included."""
    samplers: tuple[Sequence, ...]
    """The sequences that sample from the logits of the last token: none in the middle of a context; at the end of a
    prompt also those that await it."""
    drafts: abc.Sequence[int] = ()
    """Draft tokens. If there are any, `sequence` is the only sampler, and has a further draw for each of them."""
    scored: Scored | None = None
    """See `Slice`."""
    kept: tuple[Kept, ...] = ()
    """See `Slice`."""


class StepPlan(msgspec.Struct, frozen=True):
    entries: list[StepEntry]
    """Generation first, then context."""
    slices: list[Slice]
    """One per entry."""
    num_draws: int
    """Draws of all slices, in the order of the entries' samplers."""
    num_drafted: int
    """Draft tokens of all its sequences."""
    has_proposals: bool
    """Whether any of its draws has a proposal."""
    kept: list[Kept]
    """The `kept` of all entries."""


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step whose results have not been collected."""

    schedule: Schedule
    plan: StepPlan
    before: Step
    """Moves and loads that preceded the slices."""
    launched: Launched | Exception
    start: float
    """When its planning began, in seconds on the engine's clock."""

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
        """Plan a step and launch it. `before`: moves and loads that precede the slices. `idle`: no step is in flight.
        If the launch fails, `collect` raises the error, as for a step that fails later. Raises DeviceLostError if the
        draft model's failure has shown that the device is lost."""
        moves, failed = before.moves, None
        if moves and idle and drafting.may_use_model(schedule):
            # The draft model computes in these blocks before the step does.
            moves, failed = (), _move(runner, moves)
        step = plan(schedule, drafting, idle=idle and failed is None)
        slices = _with_positions(step.entries, step.slices) if runner.image_rows else step.slices
        launched = failed or _launch(runner, Step(tuple(slices), moves, before.loads))
        return cls(schedule, step, before, launched, start)

    @property
    def decides_next(self) -> bool:
        """Whether the next step can be planned only with its results: sequences that await a prompt receive their first
        token from it, it has drafts, or it decides whether the next draw has a proposal."""
        plan = self.plan
        return plan.num_drafted > 0 or plan.has_proposals or any(len(entry.samplers) > 1 for entry in self._context)

    @property
    def _context(self) -> list[StepEntry]:
        return self.plan.entries[len(self.schedule.generation) :]

    def collect(self) -> "StepResults":
        """Wait for the results. Raises the runner's exception, or RuntimeError if the number of results is wrong."""
        if isinstance(self.launched, Exception):
            raise self.launched
        drawn = self.launched.collect()
        if len(drawn) != self.plan.num_draws:
            raise RuntimeError(f"the runner returned {len(drawn)} tokens for {self.plan.num_draws} draws")
        # Only context entries have `scored`.
        scored = [entry for entry in self._context if entry.scored is not None] if self.schedule.context else []
        logprobs = list(zip(scored, self.launched.prompt_logprobs(), strict=True)) if scored else []
        tensors = self._tensors(self.launched) if self.plan.kept else []
        return StepResults(drawn, logprobs, tensors, self.launched.missing_adapters())

    def _tensors(self, launched: Launched) -> "list[tuple[StepEntry, list[list[KeptRows]]]]":
        rows = launched.kept_rows()
        if len(rows) != len(self.plan.kept):
            raise RuntimeError(f"the runner returned {len(rows)} lists of rows for {len(self.plan.kept)}")
        remaining = iter(rows)
        return [(entry, [next(remaining) for _ in entry.kept]) for entry in self.plan.entries if entry.kept]


def _move(runner: Runner, moves: tuple[Move, ...]) -> Exception | None:
    """Carry out moves and wait for them; returns the error if that fails."""
    try:
        runner.launch(Step((), moves)).collect()
    except Exception as error:  # noqa: BLE001 - as in `_launch`
        return error
    return None


def _launch(runner: Runner, step: Step) -> Launched | Exception:
    try:
        return runner.launch(step)
    except Exception as error:  # noqa: BLE001 - only this step's sequences fail, when the step is collected
        return error


class StepResults(msgspec.Struct, frozen=True):
    drawn: list[Drawn]
    """One result per draw."""
    prompt_logprobs: list[tuple[StepEntry, bytes]]
    """Encoded rows of the entries with `scored`."""
    tensors: list[tuple[StepEntry, list[list[KeptRows]]]]
    """Rows of the entries with `kept`: a list for each `Kept`."""
    missing: abc.Mapping[int, str]
    """See `Launched.missing_adapters`."""


def _with_positions(entries: list[StepEntry], slices: list[Slice]) -> list[Slice]:
    """The slices, with positions where the request has images in grids."""
    # Not in `plan`, so that models without images do not pay for it.
    positions = [entry.sequence.request.positions for entry in entries]
    if not any(positions):
        return slices
    pairs = zip(slices, positions, strict=True)
    return [part if placed is None else replace(part, positions=placed) for part, placed in pairs]


def plan(schedule: Schedule, drafting: Drafting, *, idle: bool = True) -> StepPlan:
    """Make the slices of a schedule. `idle`: see `Drafting.propose`. Marks the tokens to compute as in flight and the
    tokens to sample as promised."""
    # Runs for every sequence in every step: one pass, few calls and few objects.
    entries: list[StepEntry] = []
    slices: list[Slice] = []
    all_kept: list[Kept] = []
    draw = num_drafted = 0
    proposing = False
    proposed = drafting.propose(schedule, idle=idle) if schedule.drafting else {}
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
            all_kept += kept
            entries.append(StepEntry(sequence, 1, (sequence,), (), None, kept))
            slices.append(_next_slice(sequence, kept))
            sequence.expect(draw)
        sequence.num_inflight += 1
        draw += 1
        if request.proposals is not None:
            proposing |= _proposes(slices[-1])
    for chunk in schedule.context:
        sequence, num_tokens = chunk
        samplers = _samplers(chunk)
        scored = _scored(sequence, num_tokens) if sequence.request.scoring else None
        kept = kept_rows(sequence, num_tokens) if sequence.request.has_tensors else ()
        all_kept += kept
        entries.append(StepEntry(sequence, num_tokens, samplers, scored=scored, kept=kept))
        slices.append(_slice(sequence, num_tokens, samplers, scored, kept))
        # Only now, because the slice starts at `num_scheduled`.
        sequence.num_inflight += num_tokens
        for sampler in samplers:
            sampler.expect(draw)
            draw += 1
        if sequence.request.proposals is not None:
            proposing |= _proposes(slices[-1])
    return StepPlan(entries, slices, draw, num_drafted, proposing, all_kept)


def _proposes(part: Slice) -> bool:
    return any(draw.proposal is not None for draw in part.draws)


def _samplers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    # In the middle of a context no token is sampled.
    if chunk.num_tokens < sequence.num_pending:
        return ()
    return (sequence,) if sequence.output else (sequence, *sequence.request.awaiting())


def _scored(sequence: Sequence, num_tokens: int) -> Scored | None:
    """The log-probabilities of the prompt that are missing and that its next `num_tokens` tokens yield."""
    request = sequence.request
    start = max(sequence.num_scheduled, request.num_scored)
    end = min(sequence.num_scheduled + num_tokens, request.num_prompt - 1)
    if start >= end:
        return None
    return Scored(start, request.submit.prompt[start + 1 : end + 1], request.extras.prompt_logprobs or 0)


def _next_slice(sequence: Sequence, kept: tuple[Kept, ...]) -> Slice:
    """The slice of its newest token, the only pending one."""
    draws, slot = (draw_after(sequence),), sequence.adapter_slot
    start, blocks = sequence.num_computed + sequence.num_inflight, sequence.blocks
    # Positional arguments are faster, and this runs for every sequence in every step.
    if sequence.num_promised:
        return Slice(UNKNOWN_TOKEN, start, blocks, draws, sequence.promise, 0, None, kept, slot)
    return Slice(sequence.output[-1:], start, blocks, draws, None, 0, None, kept, slot)


def _slice(
    sequence: Sequence,
    num_tokens: int,
    samplers: tuple[Sequence, ...],
    scored: Scored | None,
    kept: tuple[Kept, ...],
) -> Slice:
    if sequence.num_promised:
        # The promised token is sampled from the logits of the token before it, so all tokens before it are computed or
        # in flight.
        return _next_slice(sequence, kept)
    start = sequence.num_scheduled
    tokens = sequence.tokens_between(start, start + num_tokens)
    virtual, slot = sequence.request.virtual, sequence.adapter_slot
    if virtual is not None and not virtual.occur(tokens):
        virtual = None
    return Slice(
        tokens,
        start,
        sequence.blocks,
        tuple(map(draw_after, samplers)),
        separate=_is_separate(sequence, start),
        scored=scored,
        kept=kept,
        adapter_slot=slot,
        virtual=virtual,
    )


def _drafted_slice(sequence: Sequence, drafts: abc.Sequence[int]) -> Slice:
    """The slice of its newest token, which is known, and of the draft tokens after it."""
    start = sequence.num_computed
    draws = tuple(draw_after(sequence, drafts[:count]) for count in range(len(drafts) + 1))
    tokens, separate = (sequence.output[-1], *drafts), _is_separate(sequence, start)
    return Slice(
        tokens, start, sequence.blocks, draws, drafts=len(drafts), separate=separate, adapter_slot=sequence.adapter_slot
    )


def _is_separate(sequence: Sequence, start: int) -> bool:
    """Whether a slice from this position on is computed as if each of its tokens were alone."""
    recompute = sequence.request.recompute
    return recompute is not None and recompute.separate and start >= sequence.request.num_prompt


def draw_after(sequence: Sequence, drafted: abc.Sequence[int] = ()) -> Draw:
    """The draw of the token that follows its tokens and these draft tokens."""
    request = sequence.request
    submit, position = request.submit, sequence.num_tokens - request.num_prompt + len(drafted)
    banned = request.banned if request.banned and position < submit.stopping.min_tokens else ()
    candidates = 0 if request.search is None else request.search.num_candidates
    draw = Draw(submit.sampling, sequence.index, position, sequence.output, sequence.rules, banned, drafted, candidates)
    if request.proposals is None or sequence.num_promised:
        # A step with a proposal is collected before the next one is planned (`decides_next`). So a promised token has
        # no proposal, and neither have those after it.
        return draw
    return replace(draw, proposal=request.proposals.after(sequence.output, drafted))
