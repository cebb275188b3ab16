"""Logit rules have the effect of transformers' processors, however many tokens each update adds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine_worker.sampling.logit_rules import LogitRules, StepRules, build_logit_rules
from engine_worker.sampling.rules import BadWords, Edits, PromptTokens, SeenTokens
from engine_worker.step import Draw
from sluice.wire.params import SamplingParams
from tests.engine_worker.sampling.draws import draw, edit
from tests.examples import examples

VOCAB = 6
"""A small vocabulary, so that words and n-grams repeat often."""
TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=2, max_size=4).map(tuple), max_size=4).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.1]),
    bad_words=WORDS,
    no_repeat_ngram_size=st.integers(0, 4),
)


@examples(300)
@given(
    prompt=st.lists(TOKENS, min_size=4, max_size=12),
    output=st.lists(TOKENS, max_size=12),
    words=WORDS,
    size=st.integers(0, 5),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    seed=st.integers(0, 99),
)
def test_the_scores_equal_those_of_transformers(prompt, output, words, size, penalty, seed):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    processors = [
        *([NoBadWordsLogitsProcessor([list(word) for word in words])] if words else []),
        *([NoRepeatNGramLogitsProcessor(size)] if size else []),
        *([RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []),
    ]
    expected = logits.clone()
    for processor in processors:
        expected = processor(torch.tensor([prompt + output]), expected)
    options = {"bad_words": words, "no_repeat_ngram_size": size, "repetition_penalty": penalty}
    edit(logits, [draw(prompt=prompt, output=output, **options)])
    torch.testing.assert_close(logits, expected)


def plain(edits: Edits) -> tuple:
    banned = {token for ids in edits.banned for token in ids.tolist()}
    if edits.penalized is None:
        return banned, None
    ids, repetition, amounts = edits.penalized
    # Slots are in the order of appearance, and amounts may be None.
    values = [0.0] * len(ids) if amounts is None else amounts.tolist()
    return banned, (repetition, dict(zip(ids.tolist(), values, strict=True)))


@examples(300)
@given(
    params=PARAMS,
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    tokens=st.lists(TOKENS, min_size=1, max_size=30),
    data=st.data(),
)
def test_feeding_step_by_step_equals_feeding_all_tokens_together(params, prompt, tokens, data):
    """Even if tokens are undone in between; two sequences of a request do not affect each other."""
    step_by_step, neighbour = build_logit_rules(params, prompt, [None] * 2)
    if step_by_step is None:
        return
    output: list[int] = []
    for token in tokens:
        drafts = data.draw(st.lists(TOKENS, max_size=3))
        for draft in (*drafts, data.draw(TOKENS)):
            step_by_step.feed(draft)
            neighbour.feed(draft)
        step_by_step.truncate(len(output))
        step_by_step.feed(token)
        output.append(token)
        (fresh,) = build_logit_rules(params, prompt)
        for each in output:
            fresh.feed(each)
        assert plain(step_by_step.edits()) == plain(fresh.edits())


def test_tokens_appended_after_the_step_was_planned_are_not_fed():
    output = [2]
    rules = StepRules.of([draw(presence_penalty=1.0, prompt=[1], output=output)], {})
    output.append(3)
    with rules.advanced(None) as edits:
        assert plain(edits[0])[1][1] == {2: 1.0}


def test_a_request_without_penalties_or_bans_has_no_rules():
    assert build_logit_rules(SamplingParams(top_k=3, bad_token_ids=(1,)), [1], [None] * 3) == [None] * 3


def test_sequences_share_the_data_of_the_prompt():
    params = SamplingParams(repetition_penalty=1.1, no_repeat_ngram_size=3, bad_words=((1, 2),))
    first, second = build_logit_rules(params, list(range(1000)), [None] * 2)
    assert isinstance(first, LogitRules)
    assert first._rules[0] is second._rules[0]
    assert first._rules[1]._prompt is second._rules[1]._prompt
    first.feed(5000)
    assert 5000 not in plain(second.edits())[1][1]


@pytest.mark.parametrize("prompt", [[], [1, 2, 3]])
def test_seen_tokens_grow_and_are_undone(prompt):
    seen = SeenTokens(PromptTokens(prompt), 1.0, 0.5)
    for token in range(100):
        seen.add(token)
    seen.add(7)
    assert sorted(seen.ids.tolist()) == list(range(100))
    amounts = dict(zip(seen.ids.tolist(), seen.amounts.tolist(), strict=True))
    assert (amounts[2], amounts[7]) == (1.5, 2.0)
    for token in [7, *reversed(range(100))]:
        seen.remove(token)
    assert seen.ids.tolist() == prompt
    assert not seen.amounts.any()


def test_the_cost_of_bad_words_is_their_length():
    """Many words with the same end share one path."""
    words = BadWords([(*range(i, 256), 300 + i) for i in range(255)])
    node, depth = words._root, 0
    while node.before:
        assert len(node.before) == 1
        (node,) = node.before.values()
        depth += 1
    assert depth == 256


def test_words_with_tokens_that_the_model_lacks_are_ignored():
    """A tokenizer may have more tokens than the model."""
    params = SamplingParams(bad_words=((1, VOCAB), (VOCAB + 3, 1, 2), (1, 3)))
    (rules,) = build_logit_rules(params, [1], vocab_size=VOCAB)
    scores = torch.zeros(2, VOCAB)
    edit(scores, [Draw(params, 0, 0, [], rules), draw()])
    assert (scores == -torch.inf).nonzero().tolist() == [[0, 3]]
