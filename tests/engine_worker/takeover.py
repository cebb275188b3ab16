"""A stream of a real runner that continues on another one, from blocks in a pool file."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner.runner import ModelRunner
from sluice.wire.rows import TokenLogprob
from tests.fakes.engine import EngineBench

PROMPT = [(31 * i + 7) % 97 for i in range(75)]
TOKENS = 70
POSITIONS = (1, 30, 64)
"""Tokens that were received when the engine died: in the prompt's last block, in a later one, at about the end of a
block."""

LoadInFolder = Callable[[PoolFolder], ModelRunner]


class Continued(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprob]
    computed: int
    """Known tokens that were computed again."""


def engine(load: LoadInFolder, folder: Path, name: str) -> EngineBench:
    return EngineBench(runner=load(PoolFolder(folder, name, fail)), max_sequence_tokens=200, vocab_size=4096)


def undisturbed(bench: EngineBench) -> Continued:
    bench.submit(PROMPT, TOKENS, seed=3, logprobs=4)
    bench.run()
    stream = bench.stream(1)
    return Continued(stream.tokens, stream.logprobs, bench.engine.stats.context_tokens)


def continued(bench: EngineBench, truth: Continued, position: int) -> Continued:
    """The stream from `position` on."""
    before = bench.engine.stats.context_tokens
    request = bench.submit(PROMPT, TOKENS, seed=3, logprobs=4, resume={0: truth.tokens[:position]})
    bench.run()
    stream = bench.stream(request)
    return Continued(stream.tokens, stream.logprobs, bench.engine.stats.context_tokens - before)


def check_takeover(load: LoadInFolder, folder: Path) -> None:
    """On a twin, which copies the blocks, and on the next engine, which adopts them: the same tokens, log-probabilities
    of the same bits if the runner is exact, and at most one block computed again."""
    first = engine(load, folder, "a")
    truth = undisturbed(first)
    assert truth.computed == len(PROMPT)
    for position in POSITIONS:
        check(continued(engine(load, folder, "b"), truth, position), truth, position, first.runner)
    first.runner.pool_file.close()
    for position in POSITIONS:
        restarted = engine(load, folder, "a")
        assert restarted.cache.tiers.adopted == (len(PROMPT) + TOKENS - 1) // restarted.cache.tokens_per_block
        assert restarted.runner.pool_file.damaged == 0
        check(continued(restarted, truth, position), truth, position, restarted.runner)
        restarted.runner.pool_file.close()


def check(found: Continued, truth: Continued, position: int, runner: ModelRunner) -> None:
    assert found.tokens == truth.tokens
    expected = truth.logprobs[position:]
    if runner.exact:
        assert found.logprobs == expected
    else:
        assert [each.logprob for each in found.logprobs] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert found.computed <= runner.tokens_per_block


def fail(reason: str) -> None:
    raise AssertionError(reason)
