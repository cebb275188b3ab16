"""From what was scheduled to what the runner computes, in one pass: this is done for every sequence in every step."""

from typing import NamedTuple

from engine_worker.request import Sequence
from engine_worker.scheduling.micro_batch import Chunk
from engine_worker.scheduling.simple import Schedule
from engine_worker.step import Draw, Slice

UNKNOWN = (0,)
"""The tokens of a slice that follows a draw."""


class Part(NamedTuple):
    """One sequence's part in a step."""

    sequence: Sequence
    num_tokens: int
    """To compute."""
    drawers: tuple[Sequence, ...]
    """Who gets a token from the logits after the last of them; after a prompt everybody who awaits it."""


class Plan(NamedTuple):
    """A step; its draws are in the order of the parts' drawers."""

    parts: list[Part]
    slices: list[Slice]
    num_draws: int


def plan(schedule: Schedule) -> Plan:
    """Generation first, then context. What is computed and drawn counts as on its way from now on."""
    parts: list[Part] = []
    slices: list[Slice] = []
    draw = 0
    drawers: tuple[Sequence, ...]
    for sequence in schedule.generation:
        drawers = (sequence,)
        parts.append(Part(sequence, 1, drawers))
        slices.append(_slice(sequence, 1, drawers))
        sequence.num_inflight += 1
        sequence.expect(draw)
        draw += 1
    for chunk in schedule.context:
        sequence, num_tokens = chunk
        drawers = _drawers(chunk)
        parts.append(Part(sequence, num_tokens, drawers))
        slices.append(_slice(sequence, num_tokens, drawers))
        sequence.num_inflight += num_tokens
        for drawer in drawers:
            drawer.expect(draw)
            draw += 1
    return Plan(parts, slices, draw)


def _drawers(chunk: Chunk) -> tuple[Sequence, ...]:
    sequence = chunk.sequence
    if chunk.num_tokens < sequence.num_pending:
        return ()
    if sequence.output:
        return (sequence,)
    return (sequence, *sequence.request.awaiting())


def _slice(sequence: Sequence, num_tokens: int, drawers: tuple[Sequence, ...]) -> Slice:
    start = sequence.num_computed + sequence.num_inflight
    draws = (_draw(sequence),) if drawers == (sequence,) else tuple(map(_draw, drawers))
    if sequence.num_promised:
        # Everything before the promised token is computed or in flight, for it is drawn after that.
        return Slice(UNKNOWN, start, sequence.blocks, draws, sequence.promise)
    return Slice(sequence.tokens_between(start, start + num_tokens), start, sequence.blocks, draws)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    spec, position = request.spec, sequence.num_tokens - request.num_prompt
    banned = request.banned if request.banned and position < spec.stopping.min_tokens else ()
    return Draw(spec.sampling, sequence.index, position, spec.prompt, sequence.output, banned)
