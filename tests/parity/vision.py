"""Checks that every kind of model with images has to pass: the tokens of its oracle, however the work is cut."""

from collections.abc import Callable, Iterable
from contextlib import closing

from sluice.ring.params import BeamSearchParams, SamplingParams, StopParams
from sluice.ring.tables import PromptTables
from tests.parity.harness import EngineHarness

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 12
STOPPING = StopParams(MAX_TOKENS)

Prompt = list[int | bytes]
"""Ids, and images where they stand."""
Ask = Callable[..., int]
"""`ask(harness, oracle, prompt, **options)` sends a request; its number."""


def tokens_of(harness: EngineHarness, number: int, sequence: int = 0) -> list[int]:
    harness.run()
    return harness.stream(number, sequence).tokens


def refused(harness: EngineHarness, ids: list[int], tables: PromptTables, **options) -> str:
    number = harness.send(ids, GREEDY, STOPPING, tables=tables, **options)
    harness.run()
    fault = harness.stream(number).end.fault
    assert fault.code == "INVALID_ARGUMENT"
    return fault.message


def check_chunks(ask: Ask, oracle, prompt: Prompt, chunks: Iterable[int], *, overlap: bool) -> None:
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
        assert tokens_of(harness, ask(harness, oracle, prompt)) == expected, chunk


def check_pauses(ask: Ask, oracle, asked: list[Prompt], count: int, **options) -> None:
    """In a pool too small for all of them."""
    harness = EngineHarness(oracle.folder, max_tokens_per_step=48, max_batch_size=8, **options)
    # Rows are kept from here on. Else requests would wait for them, and which ones meet would depend on how long.
    for prompt in asked:
        tokens_of(harness, ask(harness, oracle, prompt, stopping=StopParams(1)))
    numbers = [ask(harness, oracle, prompt, stopping=StopParams(count)) for prompt in asked]
    harness.run()
    assert harness.pauses > 0
    for prompt, number in zip(asked, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, max_new_tokens=count)


def check_resume(ask: Ask, oracle, prompt: Prompt, backend: str) -> None:
    """Of several outputs."""
    sampling = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2, no_repeat_ngram_size=3)
    whole = EngineHarness(oracle.folder, backend=backend)
    number = ask(whole, oracle, prompt, sampling=sampling, n=3)
    whole.run()
    streams = [whole.stream(number, i).tokens for i in range(3)]
    assert len(set(map(tuple, streams))) == 3
    for have in (1, 7):
        harness = EngineHarness(oracle.folder, backend=backend, max_tokens_per_step=8, max_batch_size=4)
        resume = {i: tokens[:have] for i, tokens in enumerate(streams[:2])}
        again = ask(harness, oracle, prompt, sampling=sampling, n=3, resume=resume)
        harness.run()
        assert [harness.stream(again, i).tokens for i in range(3)] == streams


def check_beams(ask: Ask, oracle, prompt: Prompt) -> None:
    harness = EngineHarness(oracle.folder, max_tokens_per_step=16, max_batch_size=8)
    beams = SamplingParams(temperature=1.0, logprobs=0, beam_search=BeamSearchParams(4))
    number = ask(harness, oracle, prompt, sampling=beams, n=2)
    harness.run()
    assert harness.stream(number).tokens == oracle.generate(prompt, num_beams=4, num_return_sequences=1)


def check_two_ranks(ask: Ask, oracle, prompt: Prompt) -> None:
    with closing(EngineHarness(oracle.folder, tensor_parallel=2, max_tokens_per_step=16, max_batch_size=4)) as harness:
        assert tokens_of(harness, ask(harness, oracle, prompt)) == oracle.generate(prompt)
