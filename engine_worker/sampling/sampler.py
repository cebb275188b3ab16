"""From logits to tokens. Draws that need the same work are grouped, so that an unusual draw slows down only itself.

Sampling parameters become tensors first and go to the device in one copy (`SamplingPlan`): sampling is then queued
behind the model, and the host waits for nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.candidates import BestOfDraws, Candidates
from engine_worker.sampling.choose import Chosen, Filtered, Greedy, Unfiltered
from engine_worker.sampling.fused import TORCH, SamplingKernels
from engine_worker.sampling.guided_draws import GuidedDraws, RequestedMasks
from engine_worker.sampling.logit_edits import LogitEdits
from engine_worker.sampling.logprobs import Logprobs, compute_logprobs
from engine_worker.sampling.processors import NO_PROCESSORS, Processors, run_processors
from engine_worker.sampling.programs import DeviceEdits, HostEdits, StepPrograms
from engine_worker.sampling.rejection import Rejection
from engine_worker.sampling.rules import Edits
from engine_worker.sampling.ways import Way, by_way
from engine_worker.step import Draw, Drawn
from sluice.ring.errors import ErrorCode, Fault


class ProgramResults(NamedTuple):
    """What the programs of a step have done."""

    scores: Tensor | None = None
    """[R + P, vocab] float32: the logits, followed by the processed rows; None: no draw has processors."""
    edits: tuple[DeviceEdits | HostEdits | None, ...] = ()
    """By group of the plan."""
    faults: Mapping[int, Fault] = {}
    """By draw."""
    complete: Sequence[int] = ()
    """Draws before which their sequences have ended."""
    later: Sequence[int] = ()
    """Draws whose guides are not ready."""


NO_TOKEN = Drawn(
    0,
    fault=Fault(
        ErrorCode.NOTHING_TO_SAMPLE.name,
        "no token can be sampled: all are banned, or the model's logits are NaN or infinite",
    ),
)


class Sampled(NamedTuple):
    """Results of D draws, as tensors."""

    tokens: Tensor
    """[D] int64."""
    valid: Tensor
    """[D] bool: whether there was a token to sample; if not, the token is arbitrary."""
    logprobs: Logprobs | None
    """Of the draws that ask for logprobs."""
    short: Tensor | None = None
    """[] bool: some filter had too few candidates to decide, so the step must be sampled again with `widen`. None: no
    draw has such a filter."""
    best: tuple[BestOfDraws, ...] = ()
    """Of the draws of beams."""

    def results(self, draws: Sequence[Draw]) -> list[Drawn]:
        """As plain data, one per draw. Only once the tensors are on the host."""
        results = self._chosen(draws)
        for found in self.best:
            for i, best in found.entries().items():
                possible = [entry for entry in best[: draws[i].candidates] if entry[1] > -torch.inf]
                if results[i].drew and possible:
                    results[i] = Drawn(results[i].token, best=possible)
        return results

    def _chosen(self, draws: Sequence[Draw]) -> list[Drawn]:
        tokens, valid = self.tokens.tolist(), self.valid.tolist()
        if self.logprobs is None:
            results = list(map(Drawn, tokens))
        else:
            asked = _with_logprobs(draws)
            found = self.logprobs.entries([draws[i].sampling.logprobs or 0 for i in asked])
            entries = dict(zip(asked, found, strict=True))
            results = [Drawn(token, entries.get(i)) for i, token in enumerate(tokens)]
        return (
            results if all(valid) else [each if good else NO_TOKEN for each, good in zip(results, valid, strict=True)]
        )


class SamplingGroup(NamedTuple):
    """Draws that are sampled in the same way."""

    rows: Tensor | None
    """[N] int64: rows of the logits; None: all, in order."""
    draws: list[int]
    """Indices of the draws, by row."""
    edits: LogitEdits | None
    choose: Greedy | Unfiltered | Filtered | Candidates | Rejection

    @staticmethod
    def of(
        way: Way, chosen: list[int], draws: Sequence[Draw], rows: Sequence[int], num_rows: int, vocab_size: int
    ) -> "SamplingGroup":
        """The `chosen` of all draws. rows: the row of each draw, of `num_rows`."""
        kind, edited = way
        own = draws if len(chosen) == len(draws) else [draws[i] for i in chosen]
        edits = LogitEdits.of(own, vocab_size) if edited else None
        return SamplingGroup(_rows([rows[i] for i in chosen], num_rows), chosen, edits, kind.of(own))


class LogprobRows(NamedTuple):
    """Draws that ask for logprobs."""

    rows: Tensor | None
    """As in `SamplingGroup`."""
    draws: Tensor | None
    """[N] int64; None: all."""
    most: int
    """The most alternatives that any of them asks for."""


class SamplingPlan(NamedTuple):
    """All that sampling needs besides the logits; see `runner.batch.to_device`."""

    groups: tuple[SamplingGroup, ...]
    order: Tensor | None
    """[D] int64: index of each draw in the concatenated groups; None: they are in order."""
    logprob_rows: LogprobRows | None
    programs: StepPrograms | None
    processed_rows: Tensor | None
    """[P] int64: rows of the draws that have processors. Each of these draws is sampled from a copy of its row, behind
    the R rows of logits."""
    vocab_size: int

    def run_programs(
        self,
        logits: Tensor,
        before: Sequence[int] | None,
        processors: Processors = NO_PROCESSORS,
        guided: RequestedMasks | None = None,
    ) -> ProgramResults:
        """For `sample`. logits: [R, vocab]. before: tokens of the previous step, if draws follow it; None if it
        failed. guided: the masks that were asked for, with the same tokens."""
        if self.programs is None:
            return ProgramResults()
        scores, faults = None, {}
        with self.programs.advanced(before) as edits:
            if self.processed_rows is not None:
                scores = torch.cat((logits, logits.index_select(0, self.processed_rows)))
                faults = run_processors(processors, self.programs.processed(scores[len(logits) :]))
        found = None if guided is None else guided.collect()
        by_group = tuple(self._edits(group, edits, found, logits.device) for group in self.groups)
        if found is None:
            return ProgramResults(scores, by_group, faults)
        # A processor's fault comes first.
        return ProgramResults(scores, by_group, {**found.faults, **faults}, found.complete, found.later)

    def _edits(
        self, group: SamplingGroup, edits: Mapping[int, Edits], guided: GuidedDraws | None, device: torch.device
    ) -> DeviceEdits | HostEdits | None:
        rows = {row: edits[draw] for row, draw in enumerate(group.draws) if draw in edits} if edits else {}
        masked = None if guided is None else guided.among(None if self.order is None else group.draws)
        if not rows and masked is None:
            return None
        return HostEdits(rows, masked) if device.type == "cpu" else DeviceEdits.of(rows, masked, self.vocab_size)

    @staticmethod
    def of(
        draws: Sequence[Draw], rows: Sequence[int], num_rows: int, vocab_size: int, follows: Mapping[int, int]
    ) -> "SamplingPlan":
        """For logits [num_rows, vocab_size]. rows: the row of each draw. follows: for draws whose last output token is
        still being drawn, the draw of the previous step. Copies what it needs of the draws, whose outputs may grow."""
        ways = by_way(draws)
        programs = StepPrograms.of(draws, follows) if any(edited for _, edited in ways) else None
        processed = [] if programs is None else programs.draws_with_processors()
        own = {draw: row for row, draw in enumerate(processed, num_rows)}
        score_rows = [own.get(i, row) for i, row in enumerate(rows)] if own else rows
        groups = [
            SamplingGroup.of(way, chosen, draws, score_rows, num_rows + len(own), vocab_size)
            for way, chosen in ways.items()
        ]
        return SamplingPlan(
            tuple(groups),
            torch.tensor([i for chosen in ways.values() for i in chosen]).argsort() if len(ways) > 1 else None,
            _logprob_rows(draws, rows, num_rows),
            programs,
            torch.tensor([rows[i] for i in processed]) if processed else None,
            vocab_size,
        )


NO_PROGRAMS = ProgramResults()


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    programs: ProgramResults = NO_PROGRAMS,
    *,
    widen: bool = True,
    kernels: SamplingKernels = TORCH,
) -> Sampled:
    """logits: [R, vocab] float32. programs: what `plan.run_programs` returned; may be left out if there are none.

    widen: see `Filtered`. Without it the host never waits for the device, and the logits are left as they are, since
    the step may have to be sampled again.
    """
    chosen: list[Chosen] = []
    short: list[Tensor] = []
    best: list[BestOfDraws] = []
    # Logprobs are computed from the logits as they were.
    in_place = widen and plan.logprob_rows is None
    source = logits if programs.scores is None else programs.scores
    for group, edits in zip_longest(plan.groups, programs.edits):
        scores = source if group.rows is None else source.index_select(0, group.rows)
        if scores is source and not (in_place or (group.edits is None and edits is None)):
            scores = source.clone()
        found = _choose(group, edits, scores, widen=widen, kernels=kernels)
        chosen.append(found)
        if found.short is not None:
            short.append(found.short)
        if found.best is not None:
            best.append(BestOfDraws(group.draws, found.best))
    tokens, valid = chosen[0].tokens, chosen[0].valid
    # Back from the order of the groups to that of the draws.
    if plan.order is not None:
        tokens = torch.cat([each.tokens for each in chosen]).index_select(0, plan.order)
        valid = torch.cat([each.valid for each in chosen]).index_select(0, plan.order)
    logprobs = _logprobs(logits, plan.logprob_rows, tokens)
    return Sampled(tokens, valid, logprobs, torch.cat(short).any() if short else None, tuple(best))


def _choose(
    group: SamplingGroup,
    edits: DeviceEdits | HostEdits | None,
    scores: Tensor,
    *,
    widen: bool,
    kernels: SamplingKernels,
) -> Chosen:
    """scores: [N, vocab], which the group's edits change."""
    if group.edits is not None:
        group.edits.apply(scores)
    if isinstance(edits, HostEdits) and isinstance(group.choose, Greedy):
        return edits.choose_greedily(scores)
    if edits is not None:
        edits.apply(scores)
    return group.choose(scores, widen=widen, kernels=kernels)


def _rows(rows: list[int], num_rows: int) -> Tensor | None:
    return None if rows == list(range(num_rows)) else torch.tensor(rows)


def _with_logprobs(draws: Sequence[Draw]) -> list[int]:
    # Those of beams come with their candidates.
    return [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and not draw.candidates]


def _logprob_rows(draws: Sequence[Draw], rows: Sequence[int], num_rows: int) -> LogprobRows | None:
    asked = _with_logprobs(draws)
    if not asked:
        return None
    most = max(draws[i].sampling.logprobs or 0 for i in asked)
    picked = None if len(asked) == len(draws) else torch.tensor(asked)
    return LogprobRows(_rows([rows[i] for i in asked], num_rows), picked, most)


def _logprobs(logits: Tensor, wanted: LogprobRows | None, tokens: Tensor) -> Logprobs | None:
    if wanted is None:
        return None
    rows = logits if wanted.rows is None else logits.index_select(0, wanted.rows)
    return compute_logprobs(rows, tokens if wanted.draws is None else tokens.index_select(0, wanted.draws), wanted.most)
