"""A request that goes on where an earlier attempt stopped: the same tokens and logprobs as undisturbed, to the last."""

from itertools import cycle

import pytest

from sluice.ring.params import SamplingParams, StopParams
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
    """A fifth of the tokens end a sequence, but not in its first half."""
    return StopParams(MAX_TOKENS, **({"min_tokens": 10, "stop_token_ids": ENDS} if kind == "min_tokens" else {}))


def asked(kind: str, seed: int = 0) -> dict:
    return {"sampling": SamplingParams(seed=seed, logprobs=2, **KINDS[kind]), "stopping": stopping(kind), "n": N}


@pytest.fixture(scope="module")
def undisturbed(model_folder, prompts) -> dict[str, tuple]:
    """Of each kind its prompt and what its sequences got."""
    found = {}
    harness = EngineHarness(model_folder)
    for i, (kind, size) in enumerate(zip(KINDS, (33, 64, 5, 47, 21, 16), strict=True)):
        prompt = prompts[9 + 3 * i][:size]
        number = harness.send(prompt, **asked(kind))
        harness.run()
        found[kind] = (prompt, [harness.stream(number, i) for i in range(N)])
    return found


def check(harness: EngineHarness, number: int, whole: list, have: dict[int, int]) -> None:
    for index, size in have.items():
        stream, expected = harness.stream(number, index), whole[index]
        assert stream.tokens == expected.tokens
        assert stream.end.reason is expected.end.reason
        logprobs = [entry.logprob for entry in expected.logprobs[size:]]
        assert [entry.logprob for entry in stream.logprobs] == pytest.approx(logprobs, abs=1e-4)
        check_ranks([entry.rank for entry in stream.logprobs], [entry.rank for entry in expected.logprobs[size:]])


def cuts(whole: list, first: int) -> dict[int, int]:
    """How many tokens each sequence has: every sequence at another place, from none to all."""
    return {i: (first + 7 * i) % (len(stream.tokens) + 1) for i, stream in enumerate(whole)}


@pytest.mark.parametrize(
    "options", [{"block_reuse": False}, {"overlap": True}, {}], ids=["uncached", "cached, overlap", "cached"]
)
def test_cut_after_every_token(model_folder, undisturbed, options):
    """All cuts of all kinds beside each other, the prompts in several chunks."""
    harness = EngineHarness(model_folder, max_tokens_per_step=128, **options)
    resumed = []
    for first in range(MAX_TOKENS + 1):
        for kind, (prompt, whole) in undisturbed.items():
            have = cuts(whole, first)
            resume = {i: whole[i].tokens[:size] for i, size in have.items()}
            resumed.append((harness.send(prompt, resume=resume, **asked(kind)), whole, have))
    harness.run()
    for number, whole, have in resumed:
        check(harness, number, whole, have)


def test_cut_in_the_midst_of_pauses(model_folder, undisturbed):
    """In memory for a few of them, so that resumed ones are paused and resume again."""
    harness = EngineHarness(model_folder, kv_cache_tokens=128, tokens_per_block=4, max_tokens_per_step=64)
    resumed = []
    for first, (kind, (prompt, whole)) in zip(range(1, 19), cycle(undisturbed.items()), strict=False):
        have = cuts(whole, first)
        resume = {i: whole[i].tokens[:size] for i, size in have.items()}
        resumed.append((harness.send(prompt, resume=resume, salt=str(first), **asked(kind)), whole, have))
    harness.run()
    assert harness.pauses > 0
    for number, whole, have in resumed:
        check(harness, number, whole, have)


def test_one_ended_the_other_goes_on(model_folder, undisturbed):
    harness = EngineHarness(model_folder)
    for kind, (prompt, whole) in undisturbed.items():
        size = len(whole[1].tokens) // 2
        number = harness.send(prompt, resume={1: whole[1].tokens[:size]}, ended=[0], **asked(kind))
        harness.run()
        assert (number, 0, 0) not in harness.receiver.streams
        check(harness, number, whole, {1: size})


def test_some_end_by_a_stop_token(undisturbed):
    """Else min_tokens would not be tested."""
    sizes = [len(stream.tokens) for stream in undisturbed["min_tokens"][1]]
    assert max(sizes) > 10
    assert min(sizes) < MAX_TOKENS
