"""Another rank calls the logits processors with the same arguments as rank 0."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_worker.parallel.commands import ComputeStep, decode, encode
from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.sampling.processors import BATCHED, Processing, Processors
from engine_worker.sampling.replicas import ReplicatedProcessors, ReplicatedSequences, ReplicatedStep
from engine_worker.sampling.sampler import SamplingPlan
from engine_worker.step import Draw
from sluice.wire.params import SamplingParams
from sluice.wire.requests import Extras
from tests.examples import examples
from tests.fakes.engine import spec_of

VOCAB = 20


class Recorded:
    """The processors of one rank, with a record of their calls."""

    def __init__(self, broken: bool = False) -> None:
        self.calls: list = []
        self.broken = broken
        self.all = Processors({"one": self._one}, self._batched)

    def _one(self, request_id, logits, token_ids, stream, client_id) -> None:
        self.calls.append((request_id, logits.tolist(), [list(each) for each in token_ids], client_id))
        logits += 1
        if self.broken:
            raise KeyError

    def _batched(self, request_ids, logits, token_ids, stream, client_ids) -> None:
        self.calls += list(
            zip(
                request_ids,
                [each.tolist() for each in logits],
                [[*map(list, each)] for each in token_ids],
                client_ids,
                strict=True,
            )
        )
        for each in logits:
            each *= 2


class Ranks:
    """Rank 0 launches steps and sends them to another rank as messages."""

    def __init__(self) -> None:
        self.replicated = ReplicatedSequences()
        self.first, self.second = Recorded(), Recorded()
        self.other = ReplicatedProcessors(self.second.all)

    def launch(self, draws: list[Draw], follows: dict[int, int]) -> tuple[SamplingPlan, ReplicatedStep | None]:
        plan = SamplingPlan.of(draws, list(range(len(draws))), len(draws), VOCAB, follows)
        message = encode(ComputeStep((), None, self.replicated.step(plan.rules)))
        return plan, decode(bytearray(message)).processed

    def compute(self, plan: SamplingPlan, sent: ReplicatedStep | None, logits: torch.Tensor, before) -> None:
        rows = logits[:0] if plan.processed_rows is None else logits.index_select(0, plan.processed_rows)
        plan.run_rules(logits, before, self.first.all)
        if sent is not None:
            self.other.run(sent, rows, [] if plan.rules is None else plan.rules.followed(before))
        assert self.first.calls == self.second.calls


def sequence(number: int, names: tuple[str, ...], prompt: list[int]) -> tuple[SamplingParams, list[int], object]:
    params = SamplingParams(logits_processors=names)
    spec = replace(spec_of(prompt), sampling=params, name=str(number), extras=Extras(client_id=number or None))
    (rules,) = build_logit_rules(params, prompt, Processing.of(spec))
    return params, [], rules


KINDS = st.sampled_from([(), ("one",), (BATCHED,), ("one", BATCHED), (BATCHED, "one")])
PROMPTS = st.lists(st.integers(0, 99), min_size=1, max_size=4)
CHOSEN = st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=4)
STEPS = st.lists(st.tuples(CHOSEN, st.integers(0, 5)), max_size=12)


@pytest.mark.long
@examples(100)
@given(kinds=st.lists(st.tuples(KINDS, PROMPTS), min_size=4, max_size=4), steps=STEPS, overlap=st.booleans())
def test_both_ranks_make_the_same_calls(kinds, steps, overlap):
    """Sequences begin and end, and failed draws are repeated; with overlap a draw follows one in flight."""
    ranks = Ranks()
    live = [sequence(i, *kind) for i, kind in enumerate(kinds)]
    pending: dict[int, int] = {}
    drawn: list[int] | None = []
    for number, (chosen, event) in enumerate(steps):
        draws = [Draw(live[i][0], 0, len(live[i][1]), live[i][1], live[i][2]) for i in chosen]
        follows = {at: pending[i] for at, i in enumerate(chosen) if i in pending}
        plan, sent = ranks.launch(draws, follows)
        # With overlap, the tokens of the previous step are appended after the launch.
        before = drawn
        for i, at in pending.items():
            if drawn is not None:
                live[i][1].append(drawn[at])
        ranks.compute(
            plan, sent, torch.randn(len(draws), VOCAB, generator=torch.Generator().manual_seed(number)), before
        )
        drawn = None if event == 0 else [10 * number + at for at in range(len(draws))]
        pending = {i: at for at, i in enumerate(chosen)}
        if not overlap and drawn is not None:
            for i, at in pending.items():
                live[i][1].append(drawn[at])
            pending = {}
        if event == 1 and chosen:
            live[chosen[0]] = sequence(chosen[0], *kinds[chosen[0]])
            pending.pop(chosen[0], None)


def test_ended_sequences_are_released():
    ranks = Ranks()
    live = [sequence(i, ("one",), [1]) for i in range(3)]
    for _ in range(2):
        draws = [Draw(params, 0, 0, output, rules) for params, output, rules in live]
        plan, sent = ranks.launch(draws, {})
        ranks.compute(plan, sent, torch.zeros(len(draws), VOCAB), None)
        del live[1:], draws, plan
        gc.collect()
    assert sorted(sent.released) == [1, 2]
    assert list(ranks.other._sequences) == [0]
    # A step without processors releases the rest.
    del live[:]
    _, sent = ranks.launch([Draw(SamplingParams(), 0, 0)], {})
    assert (list(sent.rows), list(sent.released)) == ([], [0])
    ranks.other.run(sent, torch.zeros(0, VOCAB), [])
    assert not ranks.other._sequences
    assert ranks.launch([Draw(SamplingParams(), 0, 0)], {})[1] is None


def test_a_step_sends_only_new_tokens():
    ranks = Ranks()
    params, output, rules = sequence(1, ("one",), [5, 6, 7])
    sent = []
    for token in (8, 9):
        sent.append(ranks.replicated.step(ranks.launch([Draw(params, 0, len(output), output, rules)], {})[0].rules))
        output.append(token)
    assert [(row.keep, list(row.tokens)) for step in sent for row in step.rows] == [(3, []), (4, [])]
    step = ranks.replicated.step(SamplingPlan.of([Draw(params, 0, 2, output, rules)], [0], 1, VOCAB, {}).rules)
    assert (step.rows[0].keep, list(step.rows[0].tokens), step.rows[0].begins) == (4, [9], None)


@pytest.mark.parametrize("names", [("one",), ("one", BATCHED)])
def test_a_processor_that_raises_on_another_rank_is_called_once(names):
    ranks = Ranks()
    ranks.second.broken = True
    params, output, rules = sequence(1, names, [5])
    for _ in range(3):
        plan, sent = ranks.launch([Draw(params, 0, 0, output, rules)], {})
        ranks.other.run(sent, torch.zeros(1, VOCAB), plan.rules.followed(None))
    assert len(ranks.second.calls) == 1
