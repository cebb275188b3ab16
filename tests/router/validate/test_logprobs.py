import pytest

from router.errors import RequestError
from router.validate.logprobs import check_prompt_logprobs
from router.validate.model import Limits

LIMITS = Limits(1000, 1000)


@pytest.mark.parametrize(("logprobs", "max_tokens"), [(0, 1 << 18), (3, 1 << 16)])
def test_the_log_probabilities_of_a_prompt_are_limited(logprobs, max_tokens):
    check_prompt_logprobs(logprobs, max_tokens, LIMITS)
    with pytest.raises(RequestError) as error:
        check_prompt_logprobs(logprobs, max_tokens + 1, LIMITS)
    (violation,) = error.value.violations
    assert violation.field == "spec.output.prompt_logprobs"
    assert all(str(number) in violation.description for number in (logprobs, max_tokens + 1, LIMITS.prompt_logprobs))


def test_a_request_without_prompt_log_probabilities_may_be_longer():
    check_prompt_logprobs(None, 1 << 30, LIMITS)
