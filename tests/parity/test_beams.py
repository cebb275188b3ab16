"""Beam search returns the tokens, order and scores of transformers' `generate`, next to sampled requests."""

from random import Random
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice.wire.params import BeamSearchParams, SamplingParams, StopParams
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.timeout(900)
PAD = 1


class Case(NamedTuple):
    prompt: list[int]
    beams: BeamSearchParams
    stopping: StopParams
    n: int
    banned: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    ngram: int = 0


class Hypothesis(NamedTuple):
    tokens: list[int]
    score: float


def cases_of(model, prompts, count: int, seed: int = 0) -> list[Case]:
    """Random searches. Their end tokens and banned tokens are chosen from those that occur without them."""
    random, cases = Random(seed), []
    for i in range(count):
        width = 2 + i % 7
        stop = ({}, {"early_stopping": True}, {"exhaustive": True})[i % 3]
        beams = BeamSearchParams(width, random.choice([1.0, 0.0, 0.5, 2.0, -1.0]), **stop)
        max_tokens = random.choice([1, 3, 12, 20, 24])
        plain = Case(random.choice(prompts)[:120], beams, StopParams(max_tokens), width)
        common = sorted({token for hypothesis in oracle(model, plain) for token in hypothesis.tokens} - {PAD})
        ends = tuple(random.sample(common, min(len(common), random.choice([0, 1, 3, 6]))))
        min_tokens = random.choice([0, 0, min(3, max_tokens)]) if ends else 0
        stopping = StopParams(max_tokens, min_tokens, eos_token_ids=ends)
        banned = tuple(random.sample(common, 1)) if i % 5 == 4 else ()
        words = (tuple(random.choices(common, k=2)), (*random.choices(common, k=1), PAD)) if i % 5 == 3 else ()
        ngram = 2 if i % 5 == 2 else 0
        cases.append(Case(plain.prompt, beams, stopping, random.randint(1, width), banned, words, ngram))
    return cases


@torch.inference_mode()
def oracle(model, case: Case) -> list[Hypothesis]:
    """transformers' result. Like our engine, it normalizes the probabilities after bans."""
    ids = torch.tensor([case.prompt])
    params, stopping = case.beams, case.stopping
    model.generation_config.eos_token_id = list(stopping.eos_token_ids) or None
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.width,
        num_return_sequences=case.n,
        do_sample=False,
        max_new_tokens=stopping.max_tokens,
        min_new_tokens=stopping.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping="never" if params.exhaustive else params.early_stopping,
        bad_words_ids=[list(word) for word in case.words] or None,
        no_repeat_ngram_size=case.ngram or None,
        suppress_tokens=list(case.banned) or None,
        renormalize_logits=True,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    results = []
    sequences = output.sequences[:, len(case.prompt) :].tolist()
    for row, score in zip(sequences, output.sequences_scores.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in stopping.eos_token_ids and i >= stopping.min_tokens]
        results.append(Hypothesis(row[: ends[0] + 1] if ends else row[: stopping.max_tokens], score))
    return results


def submit(harness: EngineHarness, case: Case) -> int:
    sampling = SamplingParams(
        temperature=0.0,
        logprobs=0,
        beam_search=case.beams,
        bad_token_ids=case.banned,
        bad_words=case.words,
        no_repeat_ngram_size=case.ngram,
    )
    return harness.send(case.prompt, sampling, case.stopping, n=case.n)


def read(harness: EngineHarness, number: int, case: Case) -> list[Hypothesis]:
    results = []
    for index in range(case.n):
        stream = harness.stream(number, index)
        total = sum(logprob.logprob for logprob in stream.logprobs)
        results.append(Hypothesis(stream.tokens, total / len(stream.tokens) ** case.beams.length_penalty))
    return results


def check(actual: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [hypothesis.tokens for hypothesis in actual] == [hypothesis.tokens for hypothesis in expected]
    scores = [hypothesis.score for hypothesis in expected]
    assert [hypothesis.score for hypothesis in actual] == pytest.approx(scores, rel=1e-3, abs=1e-3)


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cases(model, prompts):
    return cases_of(model, prompts, 36)


@pytest.fixture(scope="module")
def expected(model, cases):
    return [oracle(model, case) for case in cases]


@pytest.mark.long
@pytest.mark.one_model
def test_some_of_the_searches_end_with_end_tokens(cases, expected):
    lengths = [
        (len(hypothesis.tokens), case.stopping.max_tokens)
        for case, results in zip(cases, expected, strict=True)
        for hypothesis in results
    ]
    assert sum(length < max_tokens for length, max_tokens in lengths) >= 5


@pytest.mark.quick(1)
@pytest.mark.one_model
@pytest.mark.parametrize(
    ("backend", "overlap", "tokens"),
    [
        pytest.param("torch", False, 64 << 10, marks=pytest.mark.long),
        ("torch", True, 512),
        ("openvino", True, 64 << 10),
        ("openvino", False, 512),
    ],
)
def test_beams_equal_transformers_next_to_sampled_requests(
    model_folder, cases, expected, prompts, backend, overlap, tokens
):
    """All searches together, in a pool that holds all or only a few of them."""
    harness = EngineHarness(model_folder, backend=backend, overlap=overlap, kv_cache_tokens=tokens, max_batch_size=32)
    sampled = SamplingParams(temperature=0.8, seed=3)
    undisturbed = harness.generate(prompts[6:10], sampled, 24) if tokens > 1000 else None
    sampled_numbers = []
    numbers = []
    for i, case in enumerate(cases):
        if undisturbed and i < 4:
            sampled_numbers.append(harness.submit(prompts[6 + i], sampled, 24))
        numbers.append(submit(harness, case))
    harness.run()
    for number, case, results in zip(numbers, cases, expected, strict=True):
        check(read(harness, number, case), results)
    if undisturbed:
        assert [harness.stream(number).tokens for number in sampled_numbers] == undisturbed
    else:
        assert harness.pauses > 0
    assert harness.engine.cache.pool.available == harness.engine.cache.pool.num_blocks


@pytest.mark.long
def test_200_searches_equal_transformers(model_folder, model, prompts):
    cases = cases_of(model, prompts, 200, seed=1)
    harness = EngineHarness(model_folder)
    numbers = [submit(harness, case) for case in cases]
    harness.run()
    for number, case in zip(numbers, cases, strict=True):
        check(read(harness, number, case), oracle(model, case))
