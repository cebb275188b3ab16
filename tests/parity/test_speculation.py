"""Drafts change no token: streams with them equal those without, however they are sampled and disturbed."""

import pytest

from sluice.ring.params import SamplingParams, Speculation, StopParams
from tests.parity.draft_models import draft_model
from tests.parity.harness import EngineHarness
from tests.parity.near import check_ranks

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
    """Two of each kind; some prompts repeat themselves, as code does."""
    found = []
    for i in range(2 * len(KINDS)):
        kind = list(KINDS)[i % len(KINDS)]
        prompt = prompts[12 + i][:60]
        stopping = StopParams(MAX_TOKENS, **({"min_tokens": 10, "stop_token_ids": ENDS} if kind == "ends" else {}))
        sampling = SamplingParams(seed=i, logprobs=1, **KINDS[kind])
        found.append(
            {"prompt": prompt * (1 + i % 2), "sampling": sampling, "stopping": stopping, "n": 1 + (i % 5 == 0)}
        )
    return found


def run(harness: EngineHarness, asked: list[dict], speculations: list[Speculation]) -> list:
    numbers = [
        harness.send(**each, speculation=speculation) for each, speculation in zip(asked, speculations, strict=True)
    ]
    harness.run()
    streams = [harness.stream(number, i) for number, each in zip(numbers, asked, strict=True) for i in range(each["n"])]
    return [
        (
            stream.tokens,
            stream.end.reason,
            [each.logprob for each in stream.logprobs],
            [each.rank for each in stream.logprobs],
        )
        for stream in streams
    ]


def nearly(expected: list, asked: list[dict], most: int) -> list[Speculation]:
    """What each request's first sequence will get, with an error here and there."""
    firsts = [sum(each["n"] for each in asked[:i]) for i in range(len(asked))]
    tokens = [list(expected[first][0]) for first in firsts]
    for i, each in enumerate(tokens):
        each[5 + i % 7 :: 11] = [7] * len(each[5 + i % 7 :: 11])
    return [Speculation(most, tuple(each)) for each in tokens]


@pytest.fixture(scope="module")
def plain(model_folder, prompts):
    asked = requests(prompts)
    return asked, run(EngineHarness(model_folder), asked, [Speculation()] * len(asked))


def check(found: list, expected: list) -> None:
    for (tokens, reason, logprobs, ranks), (right, right_reason, right_logprobs, right_ranks) in zip(
        found, expected, strict=True
    ):
        assert (tokens, reason) == (right, right_reason)
        check_ranks(ranks, right_ranks)
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8},
        {"backend": "openvino"},
        {"block_reuse": False, "max_batch_size": 32, "max_tokens_per_step": 48},
    ],
    ids=["roomy", "overlap", "pauses, small chunks", "openvino", "uncached"],
)
@pytest.mark.parametrize("most", [1, 7])
def test_the_same_tokens_and_logprobs(model_folder, plain, options, most):
    asked, expected = plain
    harness = EngineHarness(model_folder, max_draft_batch=64, **options)
    check(run(harness, asked, nearly(expected, asked, most)), expected)
    stats = harness.engine.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 100
    assert stats.accepted_draft_tokens == sum(stream.accepted for stream in harness.receiver.streams.values())
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_a_draft_model_that_is_the_model_is_always_right(model_folder, prompts, backend):
    """It draws with the same noise, under the same filters, penalties and bans, from what it has computed itself."""
    asked = requests(prompts)
    harness = EngineHarness(model_folder, max_draft_batch=64, backend=backend, draft_model=model_folder)
    plain = run(EngineHarness(model_folder, backend=backend), asked, [Speculation()] * len(asked))
    # The second time all prompts are found in the cache.
    for _ in range(2):
        check(run(harness, asked, [Speculation(5)] * len(asked)), plain)
    stats = harness.engine.stats
    assert stats.accepted_draft_tokens > 0.98 * stats.draft_tokens > 1000


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "kv_host_memory": 1 << 22, "kv_cache_tokens": 512},
        {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8},
        {"backend": "openvino", "max_attention_window": (64,)},
    ],
    ids=["roomy", "overlap, host memory", "pauses, small chunks", "openvino, window"],
)
def test_a_draft_model_changes_no_token(model_folder, prompts, tmp_path, options):
    asked = requests(prompts)
    kept = {name: value for name, value in options.items() if name in ("backend", "max_attention_window")}
    plain = run(EngineHarness(model_folder, **kept), asked, [Speculation()] * len(asked))
    drafter = draft_model(model_folder, tmp_path, noise=0.03)
    harness = EngineHarness(model_folder, max_draft_batch=64, draft_model=drafter, **options)
    for _ in range(2):
        check(run(harness, asked, [Speculation(4)] * len(asked)), plain)
    stats = harness.engine.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 100
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


def test_what_the_caller_expects_is_accepted_in_few_steps(model_folder, plain):
    asked, expected = plain
    harness = EngineHarness(model_folder, max_draft_batch=64)
    greedy = next(i for i, each in enumerate(asked) if each["sampling"].greedy and each["n"] == 1)
    at = sum(each["n"] for each in asked[:greedy])
    tokens = expected[at][0]
    found = run(harness, [asked[greedy]], [Speculation(8, tuple(tokens))])
    check(found, [expected[at]])
    assert len(harness.steps) < len(tokens) / 4


def test_half_of_what_the_caller_expects_is_wrong(model_folder, plain):
    asked, expected = plain
    wrong = [Speculation(6, tuple(range(40, 80)))] * len(asked)
    harness = EngineHarness(model_folder, max_draft_batch=64)
    check(run(harness, asked, wrong), expected)


def test_resumed_in_the_middle(model_folder, plain):
    asked, expected = plain
    harness = EngineHarness(model_folder, max_draft_batch=64, max_tokens_per_step=128)
    numbers, at = [], 0
    speculations = nearly(expected, asked, 5)
    for i, each in enumerate(asked):
        resume = {}
        for sequence in range(each["n"]):
            tokens = expected[at + sequence][0]
            resume[sequence] = tokens[: (3 + 5 * i + 7 * sequence) % len(tokens)]
        numbers.append((harness.send(**each, resume=resume, speculation=speculations[i]), at, resume))
        at += each["n"]
    harness.run()
    for number, first, resume in numbers:
        for sequence, tokens in resume.items():
            stream, right = harness.stream(number, sequence), expected[first + sequence]
            assert stream.tokens == right[0]
            assert stream.end.reason is right[1]
            assert [each.logprob for each in stream.logprobs] == pytest.approx(right[2][len(tokens) :], abs=1e-4)
