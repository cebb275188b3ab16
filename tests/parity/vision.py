"""Checks for every vision-language model: outputs equal those of its oracle, for any batching and chunking."""

from collections.abc import Callable, Iterable
from contextlib import closing

from sluice.wire.params import BeamSearchParams, SamplingParams, Speculation, StopParams
from sluice.wire.tables import PromptTables
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 12
STOPPING = StopParams(MAX_TOKENS)

Prompt = list[int | bytes]
"""Token ids, and encoded images in their places."""
Submit = Callable[..., int]
"""`submit(harness, oracle, prompt, **options)` sends a request and returns its number."""


def tokens_of(harness: EngineHarness, number: int, sequence: int = 0) -> list[int]:
    harness.run()
    return harness.stream(number, sequence).tokens


def refused(harness: EngineHarness, ids: list[int], tables: PromptTables, **options) -> str:
    """Send a request that must be refused. Returns the error message."""
    number = harness.send(ids, GREEDY, STOPPING, tables=tables, **options)
    harness.run()
    fault = harness.stream(number).end.fault
    assert fault.code == "INVALID_ARGUMENT"
    return fault.message


def check_chunks(submit: Submit, oracle, prompt: Prompt, chunks: Iterable[int], *, overlap: bool) -> None:
    expected = oracle.generate(prompt)
    for chunk in chunks:
        harness = EngineHarness(
            oracle.folder,
            overlap=overlap,
            max_tokens_per_step=chunk,
            max_batch_size=1,
            tokens_per_block=8,
            kv_cache_tokens=2048,
        )
        assert tokens_of(harness, submit(harness, oracle, prompt)) == expected, chunk


def check_preemptions(submit: Submit, oracle, prompts: list[Prompt], max_tokens: int, **options) -> None:
    """Preemptions change no token. `options`: of the engine, whose pool must be too small for all requests."""
    harness = EngineHarness(oracle.folder, max_tokens_per_step=48, max_batch_size=8, **options)
    # Compute all image rows first. Otherwise which requests share a batch would depend on how long that takes.
    for prompt in prompts:
        tokens_of(harness, submit(harness, oracle, prompt, stopping=StopParams(1)))
    numbers = [submit(harness, oracle, prompt, stopping=StopParams(max_tokens)) for prompt in prompts]
    harness.run()
    assert harness.pauses > 0
    for prompt, number in zip(prompts, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, max_new_tokens=max_tokens)


def check_resume(submit: Submit, oracle, prompt: Prompt, backend: str) -> None:
    """A request with several outputs resumes on another engine."""
    sampling = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2, no_repeat_ngram_size=3)
    first = EngineHarness(oracle.folder, backend=backend)
    number = submit(first, oracle, prompt, sampling=sampling, n=3)
    first.run()
    streams = [first.stream(number, i).tokens for i in range(3)]
    assert len(set(map(tuple, streams))) == 3
    for count in (1, 7):
        harness = EngineHarness(oracle.folder, backend=backend, max_tokens_per_step=8, max_batch_size=4)
        resume = {i: tokens[:count] for i, tokens in enumerate(streams[:2])}
        resumed = submit(harness, oracle, prompt, sampling=sampling, n=3, resume=resume)
        harness.run()
        assert [harness.stream(resumed, i).tokens for i in range(3)] == streams


def check_beams(submit: Submit, oracle, prompt: Prompt) -> None:
    harness = EngineHarness(oracle.folder, max_tokens_per_step=16, max_batch_size=8)
    beams = SamplingParams(temperature=1.0, logprobs=0, beam_search=BeamSearchParams(4))
    number = submit(harness, oracle, prompt, sampling=beams, n=2)
    harness.run()
    assert harness.stream(number).tokens == oracle.generate(prompt, num_beams=4, num_return_sequences=1)


def check_draft_tokens(submit: Submit, oracle, prompt: Prompt, **options) -> None:
    """The caller's draft tokens are right, so that some are accepted with any model. `options`: of the engine."""
    expected = oracle.generate(prompt, max_new_tokens=40)
    harness = EngineHarness(oracle.folder, **options)
    speculation = Speculation(4, draft_token_ids=tuple(expected[:30]))
    number = submit(harness, oracle, prompt, stopping=StopParams(40), speculation=speculation)
    assert tokens_of(harness, number) == expected
    assert len(harness.steps) < 30


def check_two_ranks(submit: Submit, oracle, prompt: Prompt) -> None:
    with closing(EngineHarness(oracle.folder, tensor_parallel=2, max_tokens_per_step=16, max_batch_size=4)) as harness:
        assert tokens_of(harness, submit(harness, oracle, prompt)) == oracle.generate(prompt)
