"""From what was scheduled to what the runner computes."""

from collections.abc import Iterable
from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.step import Draw, Move, Slice, Step


class Part(NamedTuple):
    """One sequence's part in a step."""

    sequence: Sequence
    num_tokens: int
    """To compute."""
    drawers: tuple[Sequence, ...]
    """Who gets a token from the logits after the last of them; after a prompt everybody who awaits it."""


def parts_of(schedule: Schedule) -> list[Part]:
    """Generation first, then context."""
    parts = [Part(sequence, 1, (sequence,)) for sequence in schedule.generation]
    parts.extend(Part(chunk.sequence, chunk.num_tokens, _drawers(chunk)) for chunk in schedule.context)
    return parts


def step_of(parts: Iterable[Part], moves: tuple[Move, ...]) -> Step:
    """The runner's work; its draws are in the order of the parts' drawers."""
    slices = tuple(
        Slice(
            sequence.tokens_between(sequence.num_computed, sequence.num_computed + num_tokens),
            sequence.num_computed,
            sequence.blocks,
            tuple(map(_draw, drawers)),
        )
        for sequence, num_tokens, drawers in parts
    )
    return Step(slices, moves)


def _drawers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    if chunk.num_tokens < sequence.num_pending:
        return ()
    if sequence.output:
        return (sequence,)
    return (sequence, *sequence.request.awaiting())


def _draw(sequence: Sequence) -> Draw:
    request, position = sequence.request, len(sequence.output)
    spec = request.spec
    banned = request.banned if position < spec.stopping.min_tokens else ()
    return Draw(spec.sampling, sequence.index, position, spec.prompt, sequence.output, banned)
