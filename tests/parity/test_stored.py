"""With the matrices of a quantized checkpoint as they are, requests return what they return with the dense checkpoint
of the same values, whatever they ask for."""

from pathlib import Path

import pytest
import torch

from sluice.wire.params import BeamSearchParams, SamplingParams, Speculation, StopParams
from sluice.wire.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, TensorParams
from tests.engine_worker.formats.checkpoints import pair_of
from tests.parity.conftest import small_llama
from tests.parity.harness import EngineHarness

EXACT = {"backend": "openvino", "quantized_activations": False}
PROMPTS = [[(31 * i + 7 * length) % 4000 for i in range(length)] for length in (3, 20, 70)]
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Some projections stay plain: of one layer, and of those that are computed together."""
    folder = tmp_path_factory.mktemp("pair")
    excluded = ("layers.1.mlp.down_proj", "v_proj")
    return pair_of(small_llama(folder / "source"), folder, "AWQ", excluded)


@pytest.fixture(scope="module")
def harnesses(pair) -> tuple[EngineHarness, EngineHarness]:
    quantized, dense = pair
    return EngineHarness(quantized, **EXACT), EngineHarness(dense)


def ask(harness: EngineHarness, **options) -> list[int]:
    """The requests' numbers, once all have ended."""
    defaults = {"sampling": GREEDY, "stopping": StopParams(12)}
    numbers = [harness.send(prompt=prompt, **(defaults | options)) for prompt in PROMPTS]
    harness.run()
    return numbers


def outputs(harness: EngineHarness, numbers: list[int], n: int = 1) -> list[list[int]]:
    return [harness.stream(number, index).tokens for number in numbers for index in range(n)]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(seed=3, temperature=0.7, top_p=0.9)},
        {"sampling": SamplingParams(beam_search=BeamSearchParams(3))},
    ],
    ids=["seeded", "beams"],
)
def test_several_outputs(harnesses, options):
    found, expected = (outputs(harness, ask(harness, n=3, **options), n=3) for harness in harnesses)
    assert found == expected


def test_prompt_logprobs(harnesses):
    found, expected = (
        [logprob for number in ask(harness, prompt_logprobs=1) for logprob, *_ in harness.prompt_logprobs(number)]
        for harness in harnesses
    )
    assert found == pytest.approx(expected, abs=2e-3)


def test_tensors(harnesses):
    logits = []
    for harness in harnesses:
        numbers = ask(harness, tensors=TensorParams((CONTEXT_LOGITS,), (GENERATION_LOGITS,)))
        parts = [harness.tensor(number, CONTEXT_LOGITS, context=True) for number in numbers]
        logits.append(torch.cat([*parts, *(harness.tensor(number, GENERATION_LOGITS) for number in numbers)]))
    torch.testing.assert_close(*logits, atol=2e-3, rtol=1e-4)


def test_windows(pair):
    quantized, dense = pair
    found = EngineHarness(quantized, max_attention_window=(32,), **EXACT)
    expected = EngineHarness(dense, max_attention_window=(32,))
    assert outputs(found, ask(found)) == outputs(expected, ask(expected))


@pytest.mark.parametrize("own", [EXACT, {}], ids=["openvino", "torch"])
def test_a_quantized_draft_model(pair, own):
    quantized, dense = pair
    alone, drafted = EngineHarness(dense, **own), EngineHarness(dense, draft_model=quantized, **own)
    numbers = ask(drafted, speculation=Speculation(max_draft_tokens=4))
    assert outputs(drafted, numbers) == outputs(alone, ask(alone))
    assert sum(drafted.stream(number).accepted for number in numbers) > 0
