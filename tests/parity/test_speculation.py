"""Speculation changes no token, for any sampling parameters and engine configuration."""

from itertools import product

import pytest

from sluice.wire.params import SamplingParams, Speculation, StopParams
from tests.parity.draft_models import draft_model
from tests.parity.harness import EngineHarness
from tests.parity.near import check_ranks

pytestmark = pytest.mark.one_model

MAX_TOKENS = 48
WORDS = tuple((a, b) for a in range(300, 330) for b in range(300, 330))
ENDS = tuple(range(2, 8000, 7))
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.3},
    "filtered": {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"temperature": 0.2, "repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.05},
    "n-grams": {"temperature": 0.2, "no_repeat_ngram_size": 5, "bad_words": WORDS},
    "ends": {"temperature": 0.8},
    "bias": {"temperature": 0.3, "logit_bias": ((5, 3.0),), "bad_token_ids": (11,)},
}


def requests(prompts) -> list[dict]:
    """Two requests of each kind. Some prompts contain repetitions, like code."""
    specs = []
    for i in range(2 * len(KINDS)):
        kind = list(KINDS)[i % len(KINDS)]
        prompt = prompts[12 + i][:60]
        stopping = StopParams(MAX_TOKENS, **({"min_tokens": 10, "stop_token_ids": ENDS} if kind == "ends" else {}))
        sampling = SamplingParams(seed=i, logprobs=1, **KINDS[kind])
        specs.append(
            {"prompt": prompt * (1 + i % 2), "sampling": sampling, "stopping": stopping, "n": 1 + (i % 5 == 0)}
        )
    return specs


def run(harness: EngineHarness, specs: list[dict], speculations: list[Speculation]) -> list:
    """(tokens, reason, logprobs, ranks) of each sequence."""
    numbers = [
        harness.send(**spec, speculation=speculation) for spec, speculation in zip(specs, speculations, strict=True)
    ]
    harness.run()
    streams = [harness.stream(number, i) for number, spec in zip(numbers, specs, strict=True) for i in range(spec["n"])]
    return [
        (
            stream.tokens,
            stream.end.reason,
            [entry.logprob for entry in stream.logprobs],
            [entry.rank for entry in stream.logprobs],
        )
        for stream in streams
    ]


def almost_right(expected: list, specs: list[dict], max_draft_tokens: int) -> list[Speculation]:
    """Draft tokens for each request: the output of its first sequence with a few errors."""
    firsts = [sum(spec["n"] for spec in specs[:i]) for i in range(len(specs))]
    drafts = [list(expected[first][0]) for first in firsts]
    for i, draft in enumerate(drafts):
        draft[5 + i % 7 :: 11] = [7] * len(draft[5 + i % 7 :: 11])
    return [Speculation(max_draft_tokens, tuple(draft)) for draft in drafts]


@pytest.fixture(scope="module")
def plain(model_folder, prompts):
    """The requests, and their results without speculation."""
    specs = requests(prompts)
    return specs, run(EngineHarness(model_folder), specs, [Speculation()] * len(specs))


def check(actual: list, expected: list) -> None:
    for (tokens, reason, logprobs, ranks), (right, right_reason, right_logprobs, right_ranks) in zip(
        actual, expected, strict=True
    ):
        assert (tokens, reason) == (right, right_reason)
        check_ranks(ranks, right_ranks)
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


ENGINES = {
    "roomy": {},
    "overlap": {"overlap": True},
    "pauses, small chunks": {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8},
    "openvino": {"backend": "openvino"},
    "uncached": {"block_reuse": False, "max_batch_size": 32, "max_tokens_per_step": 48},
}
QUICK = {(1, "roomy"), (1, "overlap"), (7, "pauses, small chunks"), (7, "openvino"), (7, "uncached")}
"""Each engine with one number of draft tokens."""


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("max_draft_tokens", "name"),
    [
        (count, name) if (count, name) in QUICK else pytest.param(count, name, marks=pytest.mark.long)
        for count, name in product((1, 7), ENGINES)
    ],
)
def test_draft_tokens_of_the_caller_change_no_token_and_no_logprob(model_folder, plain, name, max_draft_tokens):
    (specs, expected), options = plain, ENGINES[name]
    harness = EngineHarness(model_folder, max_draft_batch=64, **options)
    check(run(harness, specs, almost_right(expected, specs, max_draft_tokens)), expected)
    stats = harness.engine.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 100
    assert stats.accepted_draft_tokens == sum(stream.accepted for stream in harness.receiver.streams.values())
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.long), "openvino"])
def test_a_draft_model_that_equals_the_model_is_almost_always_right(model_folder, prompts, backend):
    """The draft model samples with the same noise, filters, penalties and bans."""
    specs = requests(prompts)
    harness = EngineHarness(model_folder, max_draft_batch=64, backend=backend, draft_model=model_folder)
    plain = run(EngineHarness(model_folder, backend=backend), specs, [Speculation()] * len(specs))
    # The second time, all prompts are in the prefix cache.
    for _ in range(2):
        check(run(harness, specs, [Speculation(5)] * len(specs)), plain)
    stats = harness.engine.stats
    assert stats.accepted_draft_tokens > 0.98 * stats.draft_tokens > 1000


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param(
            {"overlap": True, "kv_host_memory": 1 << 22, "kv_cache_tokens": 512, "max_tokens_per_step": 128},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8}, marks=pytest.mark.long
        ),
        {"backend": "openvino", "max_attention_window": (64,)},
    ],
    ids=["roomy", "overlap, host memory, chunks", "pauses, small chunks", "openvino, window"],
)
def test_a_draft_model_changes_no_token(model_folder, prompts, tmp_path, options):
    specs = requests(prompts)
    same_tokens = {name: value for name, value in options.items() if name in ("backend", "max_attention_window")}
    plain = run(EngineHarness(model_folder, **same_tokens), specs, [Speculation()] * len(specs))
    drafter = draft_model(model_folder, tmp_path, noise=0.03)
    harness = EngineHarness(model_folder, max_draft_batch=64, draft_model=drafter, **options)
    for _ in range(2):
        check(run(harness, specs, [Speculation(4)] * len(specs)), plain)
    stats = harness.engine.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 100
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


def test_right_draft_tokens_of_the_caller_save_steps(model_folder, plain):
    specs, expected = plain
    harness = EngineHarness(model_folder, max_draft_batch=64)
    greedy = next(i for i, spec in enumerate(specs) if spec["sampling"].greedy and spec["n"] == 1)
    first = sum(spec["n"] for spec in specs[:greedy])
    tokens = expected[first][0]
    actual = run(harness, [specs[greedy]], [Speculation(8, tuple(tokens))])
    check(actual, [expected[first]])
    assert len(harness.steps) < len(tokens) / 4


def test_wrong_draft_tokens_of_the_caller_change_nothing(model_folder, plain):
    specs, expected = plain
    wrong = [Speculation(6, tuple(range(40, 80)))] * len(specs)
    harness = EngineHarness(model_folder, max_draft_batch=64)
    check(run(harness, specs, wrong), expected)


def test_requests_with_draft_tokens_can_resume_in_the_middle(model_folder, plain):
    specs, expected = plain
    harness = EngineHarness(model_folder, max_draft_batch=64, max_tokens_per_step=128)
    numbers, first = [], 0
    speculations = almost_right(expected, specs, 5)
    for i, spec in enumerate(specs):
        resume = {}
        for sequence in range(spec["n"]):
            tokens = expected[first + sequence][0]
            resume[sequence] = tokens[: (3 + 5 * i + 7 * sequence) % len(tokens)]
        numbers.append((harness.send(**spec, resume=resume, speculation=speculations[i]), first, resume))
        first += spec["n"]
    harness.run()
    for number, first, resume in numbers:
        for sequence, tokens in resume.items():
            stream, right = harness.stream(number, sequence), expected[first + sequence]
            assert stream.tokens == right[0]
            assert stream.end.reason is right[1]
            assert [entry.logprob for entry in stream.logprobs] == pytest.approx(right[2][len(tokens) :], abs=1e-4)
