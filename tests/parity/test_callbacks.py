"""Logits processors that are callbacks of a client return the tokens of the same functions imported by an engine."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from sluice import tiny_model
from sluice.executor.callbacks import Callbacks
from sluice.settings.engine import BATCHED, ProcessorNames
from sluice.wire.params import SamplingParams
from tests.fakes import callback_processors
from tests.fakes.callback_processors import steer, steer_all
from tests.parity.harness import EngineHarness

MODULE = callback_processors.__name__
PROCESSORS = [("steer",), (), ("steer", BATCHED), (BATCHED,), ("steer",)]


@pytest.fixture
def called() -> Iterator[tuple[ProcessorNames, dict[str, list[list[int]]]]]:
    """Processor names for callbacks in this process, and the token ids passed to each call of `steer`, by request."""
    seen: dict[str, list[list[int]]] = {}

    def recorded(request_id, logits, token_ids, *arguments):
        seen.setdefault(request_id, []).append(list(token_ids[0]))
        steer(request_id, logits, token_ids, *arguments)

    callbacks = Callbacks()
    settings = callbacks.settings({"steer": recorded}, lambda *call: steer_all(*call))
    yield ProcessorNames(**settings, logits_processor_timeout=60.0), seen
    callbacks.close()


def imported() -> ProcessorNames:
    return ProcessorNames({"steer": f"{MODULE}:steer"}, f"{MODULE}:steer_all")


def generate(processors: ProcessorNames, **options) -> tuple[list, int]:
    """Run one request for each entry of PROCESSORS, the last with two sequences.

    Returns their tokens and the number of preemptions.
    """
    options = {"kv_cache_tokens": 2048, "max_batch_size": 8, "max_tokens_per_step": 24, **options}
    with closing(EngineHarness(tiny_model.path(), processors=processors, **options)) as engine:
        numbers = [
            engine.submit(
                [(7 * i + 3 * j) % 4096 for j in range(5 + 11 * i)],
                SamplingParams(seed=i, temperature=0.8, logits_processors=names),
                40,
                n=2 if i == len(PROCESSORS) - 1 else 1,
            )
            for i, names in enumerate(PROCESSORS)
        ]
        engine.run()
        streams = [engine.stream(number) for number in numbers] + [engine.stream(numbers[-1], 1)]
        assert [stream.end.reason.name.lower() for stream in streams] == ["length"] * 6
        return [stream.tokens for stream in streams], engine.pauses


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_callbacks_return_the_tokens_of_imported_processors(called, overlap) -> None:
    processors, seen = called
    tokens, _ = generate(processors, overlap=overlap)
    assert tokens == generate(imported(), overlap=overlap)[0]
    assert set(seen) == {"1", "3", "5/0", "5/1"}
    # Each call was passed the prompt and all tokens so far.
    prompts = {"1": 5, "3": 27, "5/0": 49, "5/1": 49}
    outputs = {"1": tokens[0], "3": tokens[2], "5/0": tokens[4], "5/1": tokens[5]}
    for name, calls in seen.items():
        lengths = [len(call) - prompts[name] for call in calls]
        # With overlap there is also a call for a token after the end.
        assert lengths[:40] == list(range(40))
        assert [call[prompts[name] :] for call in calls[:40]] == [outputs[name][:length] for length in range(40)]


def test_preempted_sequences_return_the_same_tokens(called) -> None:
    tokens, pauses = generate(called[0], kv_cache_tokens=160)
    assert pauses > 0
    assert tokens == generate(imported(), kv_cache_tokens=2048)[0]


@pytest.mark.long
@pytest.mark.parametrize("replicate", [False, True], ids=["rank 0", "both ranks"])
def test_two_ranks_call_each_callback_once_or_once_per_rank(called, replicate) -> None:
    processors, seen = called
    names = ProcessorNames(
        processors.logits_processors,
        processors.logits_processor_batched,
        replicate,
        processors.logits_processor_timeout,
    )
    assert generate(names, tensor_parallel=2)[0] == generate(imported())[0]
    assert len(seen["1"]) == (80 if replicate else 40)
