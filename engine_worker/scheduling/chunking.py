"""How the tokens that a step has left for contexts are shared out; the policies are TensorRT-LLM's.

A unit is one block, or the budget where that is less. A chunk that does not finish its context ends at the end of a
unit, so tokens that make no unit stay unused; the first context always gets some.
"""

from collections import abc

from engine_worker.request import Sequence


def first_come_first_served(waiting: abc.Sequence[Sequence], budget: int, unit: int) -> list[int]:
    """Tokens for each of these contexts: all that are ready, one context after the other.

    What is left when one had to be cut goes to those behind it that can finish with that.
    """
    sizes, unit = [], min(unit, budget)
    for sequence in waiting:
        size = sequence.num_ready
        if size > budget:
            size = max(0, _floor(sequence.num_scheduled + budget, unit) - sequence.num_scheduled)
        sizes.append(size)
        budget -= size
        if budget < 1:
            break
    return sizes


def equal_progress(waiting: abc.Sequence[Sequence], budget: int, unit: int) -> list[int]:
    """Tokens for each of these contexts: a unit in turn, until somebody's turn finds no unit left."""
    sizes, unit, turn = [0] * len(waiting), min(unit, budget), list(enumerate(waiting))
    while turn and budget:
        going_on, short = [], False
        for index, sequence in turn:
            start = sequence.num_scheduled + sizes[index]
            more = min(_floor(start, unit) + unit - start, sequence.num_ready - sizes[index])
            if more > budget:
                short = True
                continue
            sizes[index] += more
            budget -= more
            if sizes[index] < sequence.num_ready:
                going_on.append((index, sequence))
        turn = [] if short else going_on
    return sizes


def whole(waiting: abc.Sequence[Sequence], budget: int) -> list[int]:
    """Tokens for the contexts, in order, that fit whole; the first runs however long it is, for it might never fit."""
    sizes: list[int] = []
    for sequence in waiting:
        if sizes and sequence.num_pending > budget:
            break
        sizes.append(sequence.num_pending)
        budget -= sequence.num_pending
    return sizes


def _floor(position: int, unit: int) -> int:
    return position // unit * unit
