"""A request that resumes an earlier attempt returns the tokens and log-probabilities of an undisturbed one."""

from itertools import cycle

import pytest

from sluice.wire.params import SamplingParams, StopParams
from tests.parity.harness import EngineHarness
from tests.parity.near import check_ranks

MAX_TOKENS = 20
ENDS = tuple(range(2, 8000, 7))
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "n-grams": {"no_repeat_ngram_size": 2, "temperature": 0.3},
    "min_tokens": {"temperature": 1.5},
}
N = 2


def stopping(kind: str) -> StopParams:
    """With min_tokens: one token in seven ends a sequence, but not in its first half."""
    return StopParams(MAX_TOKENS, **({"min_tokens": 10, "stop_token_ids": ENDS} if kind == "min_tokens" else {}))


def options_of(kind: str) -> dict:
    return {"sampling": SamplingParams(seed=0, logprobs=2, **KINDS[kind]), "stopping": stopping(kind), "n": N}


@pytest.fixture(scope="module")
def undisturbed(model_folder, prompts) -> dict[str, tuple]:
    """The prompt of each kind, and the streams of its sequences."""
    requests = {}
    harness = EngineHarness(model_folder)
    for i, (kind, size) in enumerate(zip(KINDS, (33, 64, 5, 47, 21, 16), strict=True)):
        prompt = prompts[9 + 3 * i][:size]
        number = harness.send(prompt, **options_of(kind))
        harness.run()
        requests[kind] = (prompt, [harness.stream(number, i) for i in range(N)])
    return requests


def check(harness: EngineHarness, number: int, streams: list, lengths: dict[int, int]) -> None:
    """`lengths`: number of tokens from which each sequence resumed."""
    for index, length in lengths.items():
        stream, expected = harness.stream(number, index), streams[index]
        assert stream.tokens == expected.tokens
        assert stream.end.reason is expected.end.reason
        logprobs = [entry.logprob for entry in expected.logprobs[length:]]
        assert [entry.logprob for entry in stream.logprobs] == pytest.approx(logprobs, abs=1e-4)
        check_ranks([entry.rank for entry in stream.logprobs], [entry.rank for entry in expected.logprobs[length:]])


def resume_lengths(streams: list, first: int) -> dict[int, int]:
    """Number of tokens from which each sequence resumes, from none to all, different for each sequence."""
    return {i: (first + 7 * i) % (len(stream.tokens) + 1) for i, stream in enumerate(streams)}


@pytest.mark.quick(2)
@pytest.mark.one_quick_model
@pytest.mark.parametrize(
    "options", [{"block_reuse": False}, {"overlap": True}, {}], ids=["uncached", "cached, overlap", "cached"]
)
def test_requests_can_resume_after_any_token(model_folder, undisturbed, options):
    """All kinds and lengths together, with prompts in several chunks."""
    harness = EngineHarness(model_folder, max_tokens_per_step=128, **options)
    resumed = []
    for first in range(MAX_TOKENS + 1):
        for kind, (prompt, streams) in undisturbed.items():
            lengths = resume_lengths(streams, first)
            resume = {i: streams[i].tokens[:length] for i, length in lengths.items()}
            resumed.append((harness.send(prompt, resume=resume, **options_of(kind)), streams, lengths))
    harness.run()
    for number, streams, lengths in resumed:
        check(harness, number, streams, lengths)


@pytest.mark.quick(1)
def test_resumed_requests_can_be_preempted(model_folder, undisturbed):
    """In a pool that holds only a few of them."""
    harness = EngineHarness(model_folder, kv_cache_tokens=128, tokens_per_block=4, max_tokens_per_step=64)
    resumed = []
    for first, (kind, (prompt, streams)) in zip(range(1, 19), cycle(undisturbed.items()), strict=False):
        lengths = resume_lengths(streams, first)
        resume = {i: streams[i].tokens[:length] for i, length in lengths.items()}
        number = harness.send(prompt, resume=resume, salt=str(first), **options_of(kind))
        resumed.append((number, streams, lengths))
    harness.run()
    assert harness.pauses > 0
    for number, streams, lengths in resumed:
        check(harness, number, streams, lengths)


def test_one_sequence_resumes_after_the_other_has_ended(model_folder, undisturbed):
    harness = EngineHarness(model_folder)
    for kind, (prompt, streams) in undisturbed.items():
        length = len(streams[1].tokens) // 2
        number = harness.send(prompt, resume={1: streams[1].tokens[:length]}, ended=[0], **options_of(kind))
        harness.run()
        assert (number, 0, 0) not in harness.receiver.streams
        check(harness, number, streams, {1: length})


def test_some_sequences_end_with_a_stop_token(undisturbed):
    """Without such sequences, the other tests would not cover min_tokens."""
    sizes = [len(stream.tokens) for stream in undisturbed["min_tokens"][1]]
    assert max(sizes) > 10
    assert min(sizes) < MAX_TOKENS
