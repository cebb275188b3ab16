"""With OpenVINO, streams have the same bits in every precision, whether or not their tokens had to be computed again.

Log-probabilities are compared exactly: with int8 weights, a token that is computed in another shape changes their
second digit.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from openvino import Core

from bench.harness.adapters import write_adapter
from sluice import tiny_model
from sluice.wire.adapters import Adapter
from sluice.wire.params import SamplingParams, StopParams
from sluice.wire.requests import Speculation
from tests.parity.harness import EngineHarness

PRECISIONS = {
    "float32": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 KV": {"quantize": "int8", "kv_precision": "float16"},
    "u8 KV": {"quantize": "int8", "kv_precision": "u8"},
    "int8, adapters": {"quantize": "int8", "lora": True},
}
BLOCK = 32
SAMPLING = (SamplingParams(temperature=0.0, logprobs=0), SamplingParams(seed=7, temperature=1.0, logprobs=0))
MAX_TOKENS = 72


class Request(NamedTuple):
    prompt: list[int]
    sampling: SamplingParams
    adapter: Adapter | None = None


def harness_of(precision: str, folder: Path, **options) -> EngineHarness:
    if precision == "bfloat16" and "BF16" not in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute bfloat16 in hardware")
    harness = EngineHarness(folder, backend="openvino", **PRECISIONS[precision], **options)
    if harness.runner.choices["exact"] != "True":
        pytest.skip("on this CPU the bits of a token depend on the rest of the step in this precision")
    return harness


def text_of(harness: EngineHarness, number: int) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities."""
    stream = harness.stream(number)
    tokens = stream.tokens[-len(stream.logprobs) :]
    return list(zip(tokens, [entry.logprob for entry in stream.logprobs], strict=True))


def send(
    harness: EngineHarness, request: Request, tokens: list[int] = (), *, max_tokens: int = MAX_TOKENS, **options
) -> int:
    resume = {0: list(tokens)} if tokens else None
    prompt, sampling, adapter = request
    return harness.send(prompt, sampling, StopParams(max_tokens), resume=resume, adapter=adapter, **options)


def generate(harness: EngineHarness, request: Request, **options) -> list[tuple[int, float]]:
    number = send(harness, request, **options)
    harness.run()
    return text_of(harness, number)


def tokens_of(text: list[tuple[int, float]]) -> list[int]:
    return [token for token, _ in text]


def quick(*names: str) -> list:
    """All precisions, of which only `names` are quick."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.long) for name in PRECISIONS]


@pytest.fixture(params=quick("int8", "u8 KV"))
def precision(request) -> str:
    return request.param


@pytest.fixture(params=["tiny", pytest.param("real", marks=pytest.mark.long)])
def folder(request) -> Path:
    return tiny_model.path() if request.param == "tiny" else request.getfixturevalue("real_model")


@pytest.fixture
def positions(folder) -> tuple[int, ...]:
    """Number of tokens after which streams are resumed; the last one leaves a single token."""
    return (1, 20, 41, 63, 71) if folder == tiny_model.path() else (1, 20, 41, 60, 63, 100, 103)


@pytest.fixture
def adapters(request, tmp_path) -> list[Adapter | None]:
    """No adapter, and with LoRA two."""
    if "precision" not in request.fixturenames or not PRECISIONS[request.getfixturevalue("precision")].get("lora"):
        return [None]
    model = request.getfixturevalue("folder")
    return [None, *(write_adapter(tmp_path / f"rank{rank}", model, rank, seed=rank, deviation=0.15) for rank in (3, 8))]


@pytest.fixture
def requests(prompts, adapters) -> list[Request]:
    """Prompts that end within a block, at its end and one token after it."""
    return [
        Request(prompts[24 + i][:size], SAMPLING[i % 2], adapters[i % len(adapters)])
        for i, size in enumerate((41, 64, 65, 33, 97, 3))
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", quick("int8", "int8, adapters"), indirect=True)
def test_resumed_streams_have_the_same_bits(precision, folder, requests, positions):
    """Beside others, with prompts in several chunks, with and without cached blocks."""
    harness = harness_of(precision, folder, max_tokens_per_step=96)
    whole = {"max_tokens": positions[-1] + 1}
    texts = [generate(harness, request, salt="undisturbed", **whole) for request in requests]
    resumed = []
    for length in positions:
        for i, request in enumerate(requests):
            tokens = tokens_of(texts[i])[:length]
            salt = "undisturbed" if length == 20 else str(length)
            resumed.append((send(harness, request, tokens, salt=salt, **whole), texts[i][length:]))
    harness.run()
    for number, rest in resumed:
        assert text_of(harness, number) == rest


@pytest.mark.quick(1)
def test_preempted_streams_have_the_same_bits(precision, folder, requests):
    harness = harness_of(precision, folder, kv_cache_tokens=7 * BLOCK, max_tokens_per_step=96)
    texts = [generate(harness, request, salt="undisturbed") for request in requests]
    numbers = [[send(harness, request, salt=str(copy)) for request in requests] for copy in range(2)]
    harness.run()
    assert harness.pauses > 0
    assert [[text_of(harness, number) for number in copy] for copy in numbers] == [texts] * 2


@pytest.mark.quick(1)
def test_cached_blocks_change_no_bit(precision, folder, requests):
    """Those of the prompt itself, and those of an answer that a longer prompt contains."""
    harness = harness_of(precision, folder)
    for request in requests:
        first = generate(harness, request)
        assert generate(harness, request) == first
        turn = request._replace(prompt=request.prompt + tokens_of(first) + request.prompt[:5])
        assert generate(harness, turn) == generate(harness, turn, salt="uncached")


def test_draft_tokens_change_no_bit(folder, prompts):
    harness = harness_of("int8", folder)
    repeated = Request(prompts[30][:20] * 4, SAMPLING[0])
    plain = generate(harness, repeated, salt="plain")
    drafted = generate(harness, repeated, speculation=Speculation(max_draft_tokens=4))
    assert sum(step.draft_tokens for step in harness.steps) > 0
    assert drafted == plain


def test_the_fast_way_shares_blocks_between_answers_and_prompts(requests):
    harness = harness_of("int8", tiny_model.path(), recompute="fast")
    first = requests[0]
    longer = first._replace(prompt=first.prompt + tokens_of(generate(harness, first)))
    number = send(harness, longer)
    harness.run()
    assert harness.cached_tokens(number) >= (len(first.prompt) + MAX_TOKENS - 1) // BLOCK * BLOCK
