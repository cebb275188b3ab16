"""From what was scheduled to what the runner computes."""

from collections.abc import Iterable
from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.step import Draw, Move, Slice, Step

UNKNOWN = (0,)
"""The tokens of a slice that follows a draw."""


class Part(NamedTuple):
    """One sequence's part in a step."""

    sequence: Sequence
    num_tokens: int
    """To compute."""
    drawers: tuple[Sequence, ...]
    """Who gets a token from the logits after the last of them; after a prompt everybody who awaits it."""


def due(schedule: Schedule) -> Schedule:
    """What of it can be launched now."""
    return Schedule(
        [chunk for chunk in schedule.context if chunk.sequence.due],
        [sequence for sequence in schedule.generation if sequence.due],
    )


def parts_of(schedule: Schedule) -> list[Part]:
    """Generation first, then context."""
    parts = [Part(sequence, 1, (sequence,)) for sequence in schedule.generation]
    parts.extend(Part(chunk.sequence, chunk.num_tokens, _drawers(chunk)) for chunk in schedule.context)
    return parts


def step_of(parts: Iterable[Part], moves: tuple[Move, ...]) -> Step:
    """The runner's work; its draws are in the order of the parts' drawers."""
    slices = tuple(_slice(sequence, num_tokens, drawers) for sequence, num_tokens, drawers in parts)
    return Step(slices, moves)


def mark(parts: Iterable[Part]) -> None:
    """Their step is on its way: what it computes and draws counts from now on."""
    draw = 0
    for sequence, num_tokens, drawers in parts:
        sequence.num_inflight += num_tokens
        for drawer in drawers:
            drawer.expect(draw)
            draw += 1


def _drawers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    if chunk.num_tokens < sequence.num_pending:
        return ()
    if sequence.output:
        return (sequence,)
    return (sequence, *sequence.request.awaiting())


def _slice(sequence: Sequence, num_tokens: int, drawers: tuple[Sequence, ...]) -> Slice:
    start, draws = sequence.num_scheduled, tuple(map(_draw, drawers))
    if sequence.num_promised:
        # Everything before the promised token is computed or in flight, for it is drawn after that.
        return Slice(UNKNOWN, start, sequence.blocks, draws, sequence.promise)
    return Slice(sequence.tokens_between(start, start + num_tokens), start, sequence.blocks, draws)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    spec, position = request.spec, sequence.num_tokens - request.num_prompt
    banned = request.banned if position < spec.stopping.min_tokens else ()
    return Draw(spec.sampling, sequence.index, position, spec.prompt, sequence.output, banned)
