"""Turns a schedule into the step that the runner computes, and launches it."""

from dataclasses import dataclass

from engine_worker.request import Sequence
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.step import Draw, Drawn, Launched, Move, Runner, Slice, Step

UNKNOWN_TOKEN = (0,)
"""The tokens of a slice whose one token is still being drawn; the runner fills it in."""


StepEntry = tuple[Sequence, int, tuple[Sequence, ...]]
"""One sequence's share of a step: the sequence, the number of tokens whose keys and values are computed, and the
sequences that draw a token from the logits of the last one: none in the middle of a context; at the end of a prompt
also the sequences that await it."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step whose results have not been collected."""

    schedule: Schedule
    entries: list[StepEntry]
    num_draws: int
    moves: tuple[Move, ...]
    launched: Launched | Exception
    start: float
    """When its planning began, in seconds on the engine's clock."""

    @classmethod
    def launch(cls, runner: Runner, schedule: Schedule, moves: tuple[Move, ...], start: float) -> "InFlightStep":
        """Never raises: a step that cannot be launched raises in `collect`, as one that fails later does."""
        entries, slices, num_draws = plan(schedule)
        try:
            launched: Launched | Exception = runner.launch(Step(tuple(slices), moves))
        except Exception as error:  # noqa: BLE001 - only this step's sequences fail, and only once their turn comes
            launched = error
        return cls(schedule, entries, num_draws, moves, launched, start)

    @property
    def forks(self) -> bool:
        """Whether sequences that await a prompt get their first token from this step."""
        return any(len(drawers) > 1 for _, _, drawers in self.entries[len(self.schedule.generation) :])

    def collect(self) -> list[Drawn]:
        """Wait for the results, one per draw. Raises whatever the runner raises, RuntimeError on a wrong count."""
        if isinstance(self.launched, Exception):
            raise self.launched
        drawn = self.launched.collect()
        if len(drawn) != self.num_draws:
            raise RuntimeError(f"the runner returned {len(drawn)} tokens for {self.num_draws} draws")
        return drawn


def plan(schedule: Schedule) -> tuple[list[StepEntry], list[Slice], int]:
    """(entries, slices, number of draws), generation first, draws in the order of the entries' drawers.

    Marks what will be computed as in flight and what will be drawn as promised.
    """
    # For every sequence in every step: one pass, and few objects.
    entries: list[StepEntry] = []
    slices: list[Slice] = []
    draw = 0
    for sequence in schedule.generation:
        entries.append((sequence, 1, (sequence,)))
        slices.append(_slice(sequence, 1, (sequence,)))
        sequence.num_inflight += 1
        sequence.expect(draw)
        draw += 1
    for chunk in schedule.context:
        sequence, num_tokens = chunk
        drawers = _drawers(chunk)
        entries.append((sequence, num_tokens, drawers))
        slices.append(_slice(sequence, num_tokens, drawers))
        # After the slice was made, which starts where the previous step ends.
        sequence.num_inflight += num_tokens
        for drawer in drawers:
            drawer.expect(draw)
            draw += 1
    return entries, slices, draw


def _drawers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    # In the middle of a context there is nothing to draw.
    if chunk.num_tokens < sequence.num_pending:
        return ()
    return (sequence,) if sequence.output else (sequence, *sequence.request.awaiting())


def _slice(sequence: Sequence, num_tokens: int, drawers: tuple[Sequence, ...]) -> Slice:
    start = sequence.num_computed + sequence.num_inflight
    draws = (_draw(sequence),) if drawers == (sequence,) else tuple(map(_draw, drawers))
    if sequence.num_promised:
        # The promised token is drawn from the logits of the token before it, so everything before it is computed or
        # in flight: the slice has exactly this one token.
        return Slice(UNKNOWN_TOKEN, start, sequence.blocks, draws, sequence.promise)
    return Slice(sequence.tokens_between(start, start + num_tokens), start, sequence.blocks, draws)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    spec, position = request.spec, sequence.num_tokens - request.num_prompt
    banned = request.banned if request.banned and position < spec.stopping.min_tokens else ()
    return Draw(spec.sampling, sequence.index, position, sequence.output, sequence.program, banned)
