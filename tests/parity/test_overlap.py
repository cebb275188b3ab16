"""Overlapping steps changes no token and no log-probability."""

import pytest

from sluice.wire.params import SamplingParams
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.one_model

KINDS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "temperature": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
]


def generate(folder, prompts, attention: str, **options) -> tuple[EngineHarness, list]:
    """Run requests of every kind with different numbers of sequences, lengths and prompts.

    Returns the engine, and the tokens and log-probabilities of each sequence.
    """
    harness = EngineHarness(folder, attention=attention, **options)
    numbers = [
        harness.submit(
            prompts[i][:70],
            SamplingParams(seed=i, logprobs=2, **KINDS[i % len(KINDS)]),
            max_tokens=6 + 3 * i,
            n=1 + i % 3,
        )
        for i in range(12)
    ]
    harness.run()
    streams = [harness.stream(number, index) for i, number in enumerate(numbers) for index in range(1 + i % 3)]
    return harness, [(stream.tokens, [entry.logprob for entry in stream.logprobs]) for stream in streams]


@pytest.mark.quick(2)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_tokens": 192, "max_tokens_per_step": 64}], ids=["roomy", "with pauses"]
)
def test_overlap_changes_no_token_and_no_logprob(model_folder, prompts, attention, options):
    _, expected = generate(model_folder, prompts, attention)
    harness, actual = generate(model_folder, prompts, attention, overlap=True, **options)
    assert (harness.pauses > 0) == bool(options)
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(actual, expected, strict=True):
        assert tokens == right_tokens
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)
