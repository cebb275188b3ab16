"""Logits processors that both ranks call: with the same arguments, and with the same tokens as on one rank."""

from contextlib import closing

import pytest

from engine_worker.parallel import leader
from sluice import tiny_model
from sluice.settings.engine import BATCHED, ProcessorNames
from sluice.wire.params import SamplingParams, StopParams
from tests.fakes import rank_processors
from tests.fakes.processes import wait_until
from tests.parity import harness
from tests.parity.harness import EngineHarness

MODULE = rank_processors.__name__
HARMFUL = ("raise_there", "write_nan_there", "keep_there")
NAMES = ("shift", *HARMFUL)


def processors_named(*names: str, replicate: bool = True) -> ProcessorNames:
    return ProcessorNames({name: f"{MODULE}:{name}" for name in names}, f"{MODULE}:batched", replicate)


def generate(processors: ProcessorNames, named: list[tuple[str, ...]], **options) -> list:
    """Run a request for each entry of `named`, which lists its processors; the last one has two sequences.

    Returns the tokens and log-probabilities of each sequence.
    """
    options = {"kv_cache_tokens": 2048, "max_batch_size": 8, "max_tokens_per_step": 24, **options}
    with closing(EngineHarness(tiny_model.path(), processors=processors, **options)) as engine:
        numbers = [
            engine.send(
                [(7 * i + 3 * j) % 4096 for j in range(5 + 11 * i)],
                SamplingParams(seed=i, temperature=0.8, logprobs=0, logits_processors=names),
                StopParams(max_tokens=4 + 2 * i),
                n=2 if i == len(named) - 1 else 1,
            )
            for i, names in enumerate(named)
        ]
        engine.run()
        streams = [engine.stream(number) for number in numbers] + [engine.stream(numbers[-1], 1)]
        return [(stream.tokens, [entry.logprob for entry in stream.logprobs]) for stream in streams]


def check_equal(actual: list, expected: list) -> None:
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(actual, expected, strict=True):
        assert tokens == right_tokens
        assert logprobs == pytest.approx(right_logprobs, abs=1e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_both_ranks_call_processors_with_the_same_arguments(tmp_path, monkeypatch, overlap):
    named = [("shift",), (), ("shift", BATCHED), (BATCHED,), (BATCHED, "shift")]
    expected = generate(processors_named("shift"), named, overlap=overlap)
    monkeypatch.setenv(rank_processors.FOLDER, str(tmp_path))
    check_equal(generate(processors_named("shift"), named, overlap=overlap, tensor_parallel=2), expected)
    first, second = (rank_processors.calls(tmp_path, rank) for rank in range(2))
    assert first == second
    assert sum(len(ids) for _, ids, *_ in first) >= 4 + 2 * 8 + 10 + 2 * 2 * 12


@pytest.mark.long
def test_processors_that_misbehave_on_rank_1_change_no_token(tmp_path, monkeypatch):
    named = [("shift",), (*HARMFUL, "shift"), ("keep_there",), ("write_nan_there", "shift")]
    expected = generate(processors_named(*NAMES), named)
    monkeypatch.setenv(rank_processors.FOLDER, str(tmp_path))
    check_equal(generate(processors_named(*NAMES), named, tensor_parallel=2), expected)
    first, second = (rank_processors.calls(tmp_path, rank) for rank in range(2))
    # Rank 1 no longer calls a processor that raised or that emptied its tokens.
    assert 0 < len(second) < len(first)


@pytest.mark.long
def test_only_rank_0_calls_processors_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv(rank_processors.FOLDER, str(tmp_path))
    generate(processors_named("shift", replicate=False), [("shift",)], tensor_parallel=2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.long
def test_a_processor_that_hangs_on_rank_1_exceeds_rank_timeout(monkeypatch):
    reasons: list[str] = []

    def end(self, reason: str) -> None:
        reasons.append(reason)
        self._processes.kill()

    monkeypatch.setattr(leader.Leader, "_end_group", end)
    monkeypatch.setattr(harness, "STEP_SECONDS", 5.0)
    processors = processors_named("hang_there")
    engine = EngineHarness(tiny_model.path(), tensor_parallel=2, kv_cache_tokens=512, processors=processors)
    try:
        engine.submit([1, 2, 3], SamplingParams(logits_processors=("hang_there",)), 8)
        # Rank 0 does not wait for rank 1 in this step, but would in the next one.
        engine.engine.step()
        assert wait_until(lambda: bool(reasons))
    finally:
        engine.leader._group.close()
        engine.leader._sender.close()
    assert reasons == ["rank 1 has made no progress for 5 s"]
