"""Rings whose engines call functions of this program, with engines that are killed meanwhile."""

import os
import signal
import threading

import pytest

from sluice.executor import GenerationExecutor, RequestError, SamplingParams
from tests.fakes.callback_processors import steer
from tests.fakes.processes import LIMIT

PROMPTS = [[7 * i + 3 * j for j in range(20)] for i in range(6)]
COUNT = 60


def params(**more) -> SamplingParams:
    options = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "logits_processor": "steered"}
    return SamplingParams(**(options | more))


class Steered:
    """Its method is a processor that kills engines while it is called for the first sequence of that many tokens."""

    def __init__(self, deadly: int) -> None:
        self.deadly = deadly
        self.victims: list[int] = []
        self.seen: list[list[int]] = []

    def __call__(self, request_id, logits, token_ids, stream, client_id) -> None:
        if len(token_ids[0]) >= self.deadly and self.victims:
            os.kill(self.victims.pop(), signal.SIGKILL)
        self.seen.append(list(token_ids[0]))
        steer(request_id, logits, token_ids, stream, client_id)


def generate(executor: GenerationExecutor, **more) -> list[list[int]]:
    results = [executor.generate_async(prompt, params(**more), streaming=True) for prompt in PROMPTS]
    return [list(result.result(300).outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("engines", [1, 2])
def test_streams_survive_the_death_of_an_engine(engines) -> None:
    steered = Steered(40)
    with GenerationExecutor.create(
        engines=engines, logits_processors={"steered": steered}, engine_args={"kv_cache_tokens": 4096}
    ) as executor:
        pids = executor.pids
        expected = generate(executor)
        assert [len(tokens) for tokens in expected] == [COUNT] * 6
        steered.victims = [pids["engine-0"]]
        # With two engines it may be the other one that calls.
        assert generate(executor) == expected
        assert steered.victims == []
        assert executor.pids["router"] == pids["router"]
    whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    assert all(any(tokens == each[: len(tokens)] for each in whole) for tokens in steered.seen)


def test_one_that_raises_and_one_that_hangs_beside_others() -> None:
    release = threading.Event()

    def raises(*_) -> None:
        raise KeyError("a secret")

    def hangs(*_) -> None:
        release.wait(2 * LIMIT)

    with GenerationExecutor.create(
        logits_processors={"raises": raises, "hangs": hangs},
        engine_args={"kv_cache_tokens": 4096, "logits_processor_timeout": 5.0},
    ) as executor:
        expected = generate(executor, logits_processor=None)
        plain = params(logits_processor=None)
        others = [executor.generate_async(prompt, plain, streaming=True) for prompt in PROMPTS]
        for name, outcome in (("raises", "raised KeyError"), ("hangs", "did not answer within 5 s")):
            with pytest.raises(RequestError, match=f"the logits processor '{name}' {outcome}"):
                executor.generate([1, 2], params(logits_processor=name))
        with pytest.raises(RequestError, match="the logits processor 'hangs' has not returned from an earlier call"):
            executor.generate([1, 2], params(logits_processor="hangs"))
        assert [list(each.result(LIMIT).outputs[0].token_ids) for each in others] == expected
        release.set()


def test_an_executor_of_another_ring_or_machine() -> None:
    with pytest.raises(ValueError, match="functions of this program need engines on this machine"):
        GenerationExecutor.create(logits_processors={"steered": Steered(0)}, on="ray")
