"""Logits processors that are callbacks of the client, on real rings whose engines are killed meanwhile."""

import os
import signal
import threading

import pytest

from sluice.executor import GenerationExecutor, RequestError, SamplingParams
from tests.fakes.callback_processors import steer
from tests.fakes.processes import LIMIT

PROMPTS = [[7 * i + 3 * j for j in range(20)] for i in range(6)]
COUNT = 60


def params(**sampling) -> SamplingParams:
    options = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "logits_processor": "steered"}
    return SamplingParams(**(options | sampling))


class Steered:
    """A logits processor that kills the `victims` as soon as a sequence has `deadly` tokens."""

    def __init__(self, deadly: int) -> None:
        self.deadly = deadly
        self.victims: list[int] = []
        self.seen: list[list[int]] = []

    def __call__(self, request_id, logits, token_ids, stream, client_id) -> None:
        if len(token_ids[0]) >= self.deadly and self.victims:
            os.kill(self.victims.pop(), signal.SIGKILL)
        self.seen.append(list(token_ids[0]))
        steer(request_id, logits, token_ids, stream, client_id)


def generate(executor: GenerationExecutor, **sampling) -> list[list[int]]:
    results = [executor.generate_async(prompt, params(**sampling), streaming=True) for prompt in PROMPTS]
    return [list(result.result(300).outputs[0].token_ids) for result in results]


@pytest.mark.long
@pytest.mark.parametrize("engines", [pytest.param(1, marks=pytest.mark.long), 2])
def test_streams_survive_the_death_of_an_engine(engines) -> None:
    steered = Steered(40)
    with GenerationExecutor.create(
        engines=engines, logits_processors={"steered": steered}, engine_args={"kv_cache_tokens": 4096}
    ) as executor:
        pids = executor.pids
        expected = generate(executor)
        assert [len(tokens) for tokens in expected] == [COUNT] * 6
        steered.victims = [pids["engine-0"]]
        # With two engines, the call that kills engine-0 may come from either.
        assert generate(executor) == expected
        assert steered.victims == []
        assert executor.pids["router"] == pids["router"]
    sequences = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    assert all(any(tokens == sequence[: len(tokens)] for sequence in sequences) for tokens in steered.seen)


@pytest.mark.long
def test_callbacks_that_raise_or_hang_end_only_their_own_requests() -> None:
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
        concurrent = [executor.generate_async(prompt, plain, streaming=True) for prompt in PROMPTS]
        for name, outcome in (("raises", "raised KeyError"), ("hangs", "did not answer within 5 s")):
            with pytest.raises(RequestError, match=f"the logits processor '{name}' {outcome}"):
                executor.generate([1, 2], params(logits_processor=name))
        with pytest.raises(RequestError, match="the logits processor 'hangs' has not returned from an earlier call"):
            executor.generate([1, 2], params(logits_processor="hangs"))
        assert [list(result.result(LIMIT).outputs[0].token_ids) for result in concurrent] == expected
        release.set()


def test_callbacks_need_engines_on_this_machine() -> None:
    with pytest.raises(ValueError, match="functions of this program need engines on this machine"):
        GenerationExecutor.create(logits_processors={"steered": Steered(0)}, on="ray")
