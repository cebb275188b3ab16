import asyncio
from dataclasses import replace

import pytest

from router.errors import RequestError, Violations
from router.features.prompt_logprobs import PromptLogprobs
from router.parse.model import Limits, describe
from router.requests.token_log import RequestLog
from sluice.v1.generation_pb2 import GenerationSpec, OutputOptions, ResumeFrom

LIMITS = Limits(1000, 1000)


@pytest.fixture(scope="module")
def feature(checkpoint):
    return PromptLogprobs(replace(describe(checkpoint), vocab_size=1000), LIMITS)


def part_of(feature, top: int, **fields):
    message = GenerationSpec(output=OutputOptions(prompt_logprobs=top), **fields)
    return asyncio.run(feature.parse(message, Violations(), ""))


@pytest.mark.parametrize(("top", "max_tokens"), [(0, 1 << 18), (3, 1 << 16)])
def test_the_log_probabilities_of_a_prompt_are_limited(feature, top, max_tokens):
    part, log = part_of(feature, top), RequestLog(1)
    part.prepare(max_tokens, log)
    assert log.prompt is not None
    with pytest.raises(RequestError) as error:
        part.prepare(max_tokens + 1, log)
    (violation,) = error.value.violations
    assert violation.field == "spec.output.prompt_logprobs"
    assert all(str(number) in violation.description for number in (top, max_tokens + 1, LIMITS.prompt_logprobs))


def test_each_attempt_asks_for_them_until_they_have_arrived(feature):
    part, log = part_of(feature, 2), RequestLog(1)
    part.prepare(3, log)
    assert part.submitted(log) == {"prompt_logprobs": 2}
    log.mark_start_delivered()
    assert part.submitted(log) == {}


def test_a_resumed_stream_has_received_them(feature):
    assert part_of(feature, 2, resume=[ResumeFrom()]) is not None
    assert part_of(feature, 2, resume=[ResumeFrom(token_ids=[1])]) is None
