"""From logits to tokens. Draws that need the same work are grouped, so that an unusual draw slows down only itself.

Sampling parameters become tensors first (`SamplingPlan`) and are copied to the device together. So sampling is queued
behind the model, and the host does not wait for the device.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from engine_worker.sampling.choose import (
    TORCH,
    BestOfDraws,
    Candidates,
    Chosen,
    Filtered,
    Greedy,
    SamplingKernels,
    Unfiltered,
    finite,
)
from engine_worker.sampling.guided_draws import GuidedDraws, RequestedMasks
from engine_worker.sampling.logit_edits import DeviceEdits, HostEdits, LogitEdits
from engine_worker.sampling.logit_rules import StepRules
from engine_worker.sampling.logprobs import Logprobs, compute_logprobs
from engine_worker.sampling.processors import NO_PROCESSORS, Processors, run_processors
from engine_worker.sampling.rejection import Rejection
from engine_worker.sampling.rules import Edits
from engine_worker.step import Draw, Drawn
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.params import GREEDY_TEMPERATURE

Kind = type[Greedy] | type[Unfiltered] | type[Filtered] | type[Candidates] | type[Rejection]
SamplingMethod = tuple[Kind, bool]
"""How tokens are chosen, and whether the logits may be edited before that."""


class RuleResults(NamedTuple):
    """Results of a step's rules."""

    scores: Tensor | None = None
    """[R + P, vocab] float32: the logits, then the rows that logits processors have changed; None: no draw has
    processors."""
    edits: tuple[DeviceEdits | HostEdits | None, ...] = ()
    """By group of the plan."""
    faults: Mapping[int, Fault] = {}
    """By draw."""
    complete: Sequence[int] = ()
    """Draws whose sequences are complete: nothing can follow."""
    later: Sequence[int] = ()
    """Draws whose guides are not ready."""


NO_TOKEN = Drawn(
    0,
    fault=Fault(
        ErrorCode.NOTHING_TO_SAMPLE.name,
        "no token can be sampled: bans, guide or logits processors leave none",
    ),
)
INVALID_LOGITS = Drawn(
    0,
    fault=Fault(
        ErrorCode.INVALID_LOGITS.name,
        "the model computed logits that are NaN or infinite: its weights, or the precision of the engine, are at fault",
    ),
)


class Sampled(NamedTuple):
    """Results of D draws, as tensors."""

    tokens: Tensor
    """[D] int64."""
    valid: Tensor
    """[D] bool: whether there was a token to sample; if not, the token is arbitrary."""
    logprobs: Logprobs | None
    """For the draws that request logprobs."""
    short: Tensor | None = None
    """[] bool: whether some filter had too few candidates to decide, so that the step must be sampled again with
    `widen`. None: no draw has such a filter."""
    best: tuple[BestOfDraws, ...] = ()
    """Candidates of beams."""
    broken: Tensor | None = None
    """[D] bool: whether the model's logits are NaN or infinite. None: draws have no other reason to be invalid."""

    def results(self, draws: Sequence[Draw]) -> list[Drawn]:
        """As plain data, one per draw. Call only once the tensors are on the host."""
        results = self._chosen(draws)
        for candidates in self.best:
            for i, best in candidates.entries().items():
                possible = [entry for entry in best[: draws[i].candidates] if entry[1] > -torch.inf]
                if results[i].has_token and possible:
                    results[i] = Drawn(results[i].token, best=possible)
        return results

    def _chosen(self, draws: Sequence[Draw]) -> list[Drawn]:
        tokens, valid = self.tokens.tolist(), self.valid.tolist()
        if self.logprobs is None:
            results = list(map(Drawn, tokens))
        else:
            requesting = _with_logprobs(draws)
            logprobs = self.logprobs.entries([draws[i].sampling.logprobs or 0 for i in requesting])
            entries = dict(zip(requesting, logprobs, strict=True))
            results = [Drawn(token, entries.get(i)) for i, token in enumerate(tokens)]
        return results if all(valid) else self._with_faults(results, valid)

    def _with_faults(self, results: list[Drawn], valid: list[bool]) -> list[Drawn]:
        broken = [True] * len(valid) if self.broken is None else self.broken.tolist()
        faults = [INVALID_LOGITS if each else NO_TOKEN for each in broken]
        return [drawn if good else fault for drawn, good, fault in zip(results, valid, faults, strict=True)]


def group_by_method(draws: Sequence[Draw]) -> dict[SamplingMethod, list[int]]:
    """Indices of the draws, by method."""
    groups: dict[SamplingMethod, list[int]] = defaultdict(list)
    # Runs for every draw of every step, hence one loop without calls.
    for i, draw in enumerate(draws):
        sampling = draw.sampling
        kind: Kind = Unfiltered
        if draw.candidates:
            kind = Candidates
        elif sampling.temperature < GREEDY_TEMPERATURE:
            kind = Greedy
        elif draw.proposal is not None:
            kind = Rejection
        elif sampling.top_k or sampling.top_p < 1.0:
            kind = Filtered
        listed = draw.banned or sampling.logit_bias or sampling.bad_token_ids or sampling.allowed_token_ids
        groups[kind, draw.rules is not None or bool(listed)].append(i)
    return groups


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
        method: SamplingMethod,
        chosen: list[int],
        draws: Sequence[Draw],
        rows: Sequence[int],
        num_rows: int,
        vocab_size: int,
    ) -> "SamplingGroup":
        """chosen: indices of the group's draws. rows: the row of each draw, among `num_rows`."""
        kind, edited = method
        group = draws if len(chosen) == len(draws) else [draws[i] for i in chosen]
        edits = LogitEdits.of(group, vocab_size) if edited else None
        return SamplingGroup(_rows([rows[i] for i in chosen], num_rows), chosen, edits, kind.of(group))


class LogprobRows(NamedTuple):
    """Draws that request logprobs."""

    rows: Tensor | None
    """As in `SamplingGroup`."""
    draws: Tensor | None
    """[N] int64; None: all."""
    most: int
    """The most alternatives that any of them requests."""


class SamplingPlan(NamedTuple):
    """Everything that sampling needs besides the logits; copied to the device by `runner.batch.to_device`."""

    groups: tuple[SamplingGroup, ...]
    order: Tensor | None
    """[D] int64: index of each draw in the concatenated groups; None: they are in order."""
    logprob_rows: LogprobRows | None
    rules: StepRules | None
    processed_rows: Tensor | None
    """[P] int64: rows of the draws that have logits processors. Each of these draws is sampled from a copy of its row;
    the copies follow the R rows of logits."""
    vocab_size: int

    def run_rules(
        self,
        logits: Tensor,
        previous_tokens: Sequence[int] | None,
        processors: Processors = NO_PROCESSORS,
        guided: RequestedMasks | None = None,
    ) -> RuleResults:
        """Run the rules and logits processors, before `sample`. logits: [R, vocab]. previous_tokens: tokens of the
        previous step, if draws follow it; None if it failed. guided: masks that were requested with the same tokens."""
        if self.rules is None:
            return RuleResults()
        scores, faults = None, {}
        with self.rules.advanced(previous_tokens) as edits:
            if self.processed_rows is not None:
                scores = torch.cat((logits, logits.index_select(0, self.processed_rows)))
                faults = run_processors(processors, self.rules.processed(scores[len(logits) :]))
        guided_draws = None if guided is None else guided.collect()
        by_group = tuple(self._edits(group, edits, guided_draws, logits.device) for group in self.groups)
        if guided_draws is None:
            return RuleResults(scores, by_group, faults)
        # If a draw has both faults, the processor's counts.
        return RuleResults(
            scores, by_group, {**guided_draws.faults, **faults}, guided_draws.complete, guided_draws.later
        )

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
        still being sampled, the draw of the previous step that samples it. Copies what it needs of the draws, whose
        outputs may grow."""
        by_method = group_by_method(draws)
        rules = StepRules.of(draws, follows) if any(edited for _, edited in by_method) else None
        processed = [] if rules is None else rules.draws_with_processors()
        copies = {draw: row for row, draw in enumerate(processed, num_rows)}
        score_rows = [copies.get(i, row) for i, row in enumerate(rows)] if copies else rows
        groups = [
            SamplingGroup.of(method, chosen, draws, score_rows, num_rows + len(copies), vocab_size)
            for method, chosen in by_method.items()
        ]
        return SamplingPlan(
            tuple(groups),
            torch.tensor([i for chosen in by_method.values() for i in chosen]).argsort() if len(groups) > 1 else None,
            _logprob_rows(draws, rows, num_rows),
            rules,
            torch.tensor([rows[i] for i in processed]) if processed else None,
            vocab_size,
        )


NO_RULES = RuleResults()


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    rule_results: RuleResults = NO_RULES,
    *,
    widen: bool = True,
    kernels: SamplingKernels = TORCH,
) -> Sampled:
    """logits: [R, vocab] float32. rule_results: of `plan.run_rules`; optional if the plan has no rules.

    widen: see `Filtered`. Without it the host never waits for the device, and the logits are not modified, since the
    step may have to be sampled again.
    """
    chosen: list[Chosen] = []
    short: list[Tensor] = []
    best: list[BestOfDraws] = []
    # Logprobs are computed from the unmodified logits.
    in_place = widen and plan.logprob_rows is None
    broken = _broken(logits, plan)
    source = logits if rule_results.scores is None else rule_results.scores
    for group, edits in zip_longest(plan.groups, rule_results.edits):
        scores = source if group.rows is None else source.index_select(0, group.rows)
        if scores is source and not (in_place or (group.edits is None and edits is None)):
            scores = source.clone()
        choice = _choose(group, edits, scores, widen=widen, kernels=kernels)
        chosen.append(choice)
        if choice.short is not None:
            short.append(choice.short)
        if choice.best is not None:
            best.append(BestOfDraws(group.draws, choice.best))
    tokens, valid = chosen[0].tokens, chosen[0].valid
    # Restore the order of the draws.
    if plan.order is not None:
        tokens = torch.cat([each.tokens for each in chosen]).index_select(0, plan.order)
        valid = torch.cat([each.valid for each in chosen]).index_select(0, plan.order)
    logprobs = _logprobs(logits, plan.logprob_rows, tokens)
    return Sampled(tokens, valid, logprobs, torch.cat(short).any() if short else None, tuple(best), broken)


def _broken(logits: Tensor, plan: SamplingPlan) -> Tensor | None:
    """See `Sampled.broken`. Called before the logits are modified."""
    if plan.rules is None and all(group.edits is None for group in plan.groups):
        return None
    peaks = logits.amax(dim=1)
    if plan.processed_rows is not None:
        peaks = torch.cat((peaks, peaks.index_select(0, plan.processed_rows)))
    of_groups = [peaks if group.rows is None else peaks.index_select(0, group.rows) for group in plan.groups]
    of_draws = of_groups[0] if plan.order is None else torch.cat(of_groups).index_select(0, plan.order)
    return ~finite(of_draws)


def _choose(
    group: SamplingGroup,
    edits: DeviceEdits | HostEdits | None,
    scores: Tensor,
    *,
    widen: bool,
    kernels: SamplingKernels,
) -> Chosen:
    """scores: [N, vocab], changed in place by the group's edits."""
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
    # Beams get logprobs together with their candidates.
    return [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None and not draw.candidates]


def _logprob_rows(draws: Sequence[Draw], rows: Sequence[int], num_rows: int) -> LogprobRows | None:
    requesting = _with_logprobs(draws)
    if not requesting:
        return None
    most = max(draws[i].sampling.logprobs or 0 for i in requesting)
    picked = None if len(requesting) == len(draws) else torch.tensor(requesting)
    return LogprobRows(_rows([rows[i] for i in requesting], num_rows), picked, most)


def _logprobs(logits: Tensor, logprob_rows: LogprobRows | None, tokens: Tensor) -> Logprobs | None:
    if logprob_rows is None:
        return None
    rows, draws, most = logprob_rows
    chosen = tokens if draws is None else tokens.index_select(0, draws)
    return compute_logprobs(logits if rows is None else logits.index_select(0, rows), chosen, most)
