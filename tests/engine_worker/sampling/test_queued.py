"""Sampling queued behind the model: nothing waits for the device, and the last token may be unknown."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.runner.batch import to_device
from engine_worker.sampling import choose, logprobs, noise
from engine_worker.sampling.choose import TORCH
from engine_worker.sampling.filters import torch_thresholds
from engine_worker.sampling.sampler import SamplingPlan, sample
from tests.engine_worker.sampling.draws import draw, edit, tensors
from tests.examples import examples
from tests.fakes.graphs import Recording

VOCAB = 40
TOKENS = st.integers(0, VOCAB - 1)
KINDS = [
    {},
    {"min_p": 0.02},
    {"top_k": 30, "top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.3},
    {"logit_bias": ((3, 2.0),), "logprobs": 2},
    {"allowed_token_ids": tuple(range(20, 30)), "bad_token_ids": (21, 22)},
]
PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.1]),
        "prompt": st.lists(TOKENS, max_size=6),
        "output": st.lists(TOKENS, max_size=6),
        "followed": st.booleans(),
    }
)


@examples(300)
@given(
    rows=st.lists(PENALTIES, min_size=1, max_size=5),
    before=st.lists(TOKENS, min_size=5, max_size=8),
    seed=st.integers(0, 99),
)
def test_penalties_count_the_followed_token_as_if_it_were_known(rows, before, seed):
    """The results have the same bits, because overlap must not change the output."""
    follows = {i: len(before) - 1 - i for i, row in enumerate(rows) if row["followed"]}
    known, unknown = [], []
    for i, row in enumerate(rows):
        options = {key: value for key, value in row.items() if key != "followed"}
        unknown.append(draw(**options))
        known.append(
            draw(**options | {"output": [*options["output"], *([before[follows[i]]] if i in follows else [])]})
        )
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    expected, edited = logits.clone(), logits.clone()
    edit(expected, known)
    edit(edited, unknown, follows, before)
    assert torch.equal(edited, expected)


def test_after_a_failed_step_any_token_may_be_followed():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    draws = [draw(repetition_penalty=1.5, frequency_penalty=0.5, prompt=[1], output=[2]), draw(temperature=0.0)]
    sampled = tensors(logits, [0, 1], draws, {0: 3, 1: 4})
    assert sampled.valid.all()
    assert sampled.tokens[1] == logits[1].argmax()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def test_nothing_waits(logits, monkeypatch):
    """Sampling waits neither for values on the device nor for copies to it."""
    for module in (choose, logprobs, noise):
        monkeypatch.setattr(module, "is_on_host", lambda _: False)
    draws = [draw(seed=i, prompt=[1, 2], output=[3, 4], **kind) for i, kind in enumerate(KINDS)]
    plan = to_device(SamplingPlan.of(draws, range(8), 8, VOCAB, {5: 1}), logits.device)
    applied = plan.run_rules(logits, [7, 9])
    with Recording() as recording:
        sampled = sample(logits, plan, applied, widen=False)
    assert recording.calls
    assert sampled.short is not None
    assert not sampled.short
    assert torch.equal(sampled.tokens, sample(logits, plan, applied).tokens)


def test_with_a_kernel_of_thresholds_no_draw_is_short(logits, monkeypatch):
    for module in (choose, logprobs, noise):
        monkeypatch.setattr(module, "is_on_host", lambda _: False)
    monkeypatch.setattr(choose, "CANDIDATES", 16)
    draws = [
        draw(seed=i, top_p=0.95, temperature=1 + i, prompt=[1], output=[3], min_p=0.01 * (i % 2)) for i in range(8)
    ]
    plan = to_device(SamplingPlan.of(draws, range(8), 8, VOCAB, {}), logits.device)
    kernels = TORCH._replace(thresholds=torch_thresholds)
    with Recording() as recording:
        sampled = sample(logits, plan, widen=False, kernels=kernels)
    assert recording.calls
    assert sampled.short is None
    assert sample(logits, plan, widen=False).short
    assert torch.equal(sampled.tokens, sample(logits, plan).tokens)


def test_the_fake_device_detects_waits(logits):
    plan = to_device(SamplingPlan.of([draw(top_p=0.5)], [0], 8, VOCAB, {}), logits.device)
    with pytest.raises(RuntimeError, match="not permitted"), Recording():
        sample(logits, plan)
    with pytest.raises(RuntimeError, match="not permitted"), Recording():
        torch.tensor([1.0])


def test_filters_with_too_few_candidates_are_reported(logits, monkeypatch):
    monkeypatch.setattr(choose, "CANDIDATES", 16)
    flat = [draw(seed=1, top_p=0.9, temperature=9.0), draw(seed=2, temperature=0.0), draw(seed=3, top_p=0.1)]
    plan = to_device(SamplingPlan.of(flat, [0, 1, 2], 8, VOCAB, {}), logits.device)
    assert sample(logits, plan, widen=False).short
    whole = sample(logits, plan)
    assert whole.short is None
    monkeypatch.undo()
    assert torch.equal(tensors(logits, [0, 1, 2], flat).tokens, whole.tokens)
    narrow = to_device(SamplingPlan.of(flat[1:], [1, 2], 8, VOCAB, {}), logits.device)
    assert not sample(logits, narrow, widen=False).short
    greedy = to_device(SamplingPlan.of(flat[1:2], [1], 8, VOCAB, {}), logits.device)
    assert sample(logits, greedy, widen=False).short is None
