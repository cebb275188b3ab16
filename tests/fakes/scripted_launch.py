"""A step in flight on the scripted runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine_worker.step import Draw, Drawn, KeptRows, Slice, Step
from tests.fakes.scripted_cache import SlotIndex

if TYPE_CHECKING:
    from tests.fakes.runner import ScriptedRunner


class ScriptedLaunch:
    """Computed from copies of what the engine passed to `launch`, and from the tokens sampled by the step before it.

    A real device reads its inputs asynchronously, so later changes of the engine's lists must not show here.
    """

    def __init__(self, runner: ScriptedRunner, step: Step, fail: str | None, previous: ScriptedLaunch | None) -> None:
        """`fail`: see `ScriptedRunner.fail`. `previous`: the step that slices of this one may follow."""
        self._runner = runner
        self._cache = runner.kv_cache
        self._fail = fail
        self._previous = previous
        self._step = Step(tuple(map(with_own_lists, step.slices)), step.moves, step.loads)
        self.moves = step.moves
        self._loaded = {} if runner.adapters is None else runner.adapters.launched(step.loads)
        self._used_pages = self._loaded.copy()
        if runner.adapters is not None:
            for part in step.slices:
                self._used_pages |= runner.adapters.pages(part.adapter_slot)
        self._drawn: list[Drawn] = []
        self._scored: list[bytes] = []
        self._missing: dict[int, str] = {}
        self._kept: list[list[KeptRows]] = []
        self.error: Exception | None = None
        size = runner.tokens_per_block
        targets = [move.target for move in step.moves if not move.kind.to_host]
        self.written: set[SlotIndex] = {(block, offset) for block in targets for offset in range(size)}
        """Slots that the step writes, by its moves and slices."""
        self.slots: set[SlotIndex] = set()
        """Slots that the step's slices read or write."""
        for part in self._step.slices:
            end = part.start + len(part.tokens)
            self.written |= self._cache.slots_of(part, part.start, end)
            self.slots |= self._cache.slots_seen(part, end)

    def overwrites_pages_of(self, earlier: ScriptedLaunch) -> bool:
        """Whether this step loads an adapter into pages that `earlier` uses for another one.

        The same adapter may be loaded into its pages a second time, after a failed step.
        """
        return any(earlier._used_pages.get(page, number) != number for page, number in self._loaded.items())

    def compute(self) -> None:
        previous, self._previous = self._previous, None
        slices = tuple(self._with_followed_token(part, previous) for part in self._step.slices)
        excused = set()
        if previous is not None and previous.error is not None:
            lost = self._slots_lost_with(previous)
            excused = {id(part) for part in slices if self._cache.slots_seen(part, part.start) & lost}
        try:
            self._drawn = self._runner.compute(Step(slices, self._step.moves, self._step.loads), self._fail, excused)
            self._scored, self._kept = self._runner.scored, self._runner.kept
            self._missing = self._runner.missing
        except Exception as error:  # noqa: BLE001 - raised again by `collect`
            self.error = error

    def _slots_lost_with(self, failed: ScriptedLaunch) -> set[SlotIndex]:
        """Slots that hold arbitrary data after this step's moves, because `failed` wrote nothing."""
        size = self._runner.tokens_per_block
        lost = failed.written.copy()
        lost_on_host = {(move.target, i) for move in failed.moves if move.kind.to_host for i in range(size)}
        for kind, source, target in self.moves:
            read = lost_on_host if kind.from_host else lost
            written = lost_on_host if kind.to_host else lost
            for i in range(size):
                (written.add if (source, i) in read else written.discard)((target, i))
        return lost

    def collect(self) -> list[Drawn]:
        if self._runner.overlap:
            self.compute()
        self._runner.landed(self)
        if self.error is not None:
            raise self.error
        return self._drawn

    def missing_adapters(self) -> dict[int, str]:
        return self._missing

    def prompt_logprobs(self) -> list[bytes]:
        return self._scored

    def kept_rows(self) -> list[list[KeptRows]]:
        return self._kept

    def _with_followed_token(self, part: Slice, previous: ScriptedLaunch | None) -> Slice:
        """The slice with the token that it `follows` in place of the placeholder."""
        if part.follows is None:
            return part
        if previous is None:
            self._runner.violations.append(f"{part} follows no step")
        token = 0 if previous is None or previous.error is not None else previous._drawn[part.follows].token
        draws = tuple(replace(draw, output=(*draw.output, token)) for draw in part.draws)
        return replace(part, tokens=(*part.tokens[:-1], token), draws=draws, follows=None)


def with_own_tokens(part: Slice) -> Slice:
    """A copy whose tokens and block table the engine can no longer change."""
    return replace(part, tokens=tuple(part.tokens), block_table=tuple(part.block_table))


def with_own_lists(part: Slice) -> Slice:
    """A copy of which the engine can no longer change anything."""
    draws = tuple(replace(draw, output=tuple(draw.output)) for draw in part.draws)
    return replace(with_own_tokens(part), draws=draws)


def draws_of(part: Slice) -> Iterator[tuple[int, Draw]]:
    """The slice's draws, each with the number of the slice's tokens after the one that it samples from."""
    if part.drafts and len(part.draws) != part.drafts + 1:
        raise AssertionError(f"{len(part.draws)} draws for {part.drafts} drafts")
    for i, draw in enumerate(part.draws):
        yield (part.drafts - i if part.drafts else 0), draw
