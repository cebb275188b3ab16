"""Streams of a real model that the caller resumes go on as if nothing had happened. `python -m bench.deaths.resumes`"""

import pytest

from bench.deaths.resumes import SAMPLING, ResumePlan, measure


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_no_stream_of_a_real_model_differs_when_it_is_resumed_by_hand(precision):
    plan = ResumePlan()
    found = measure(plan, precision)
    assert {each.position for each in found} == {20, 60, 100}
    assert len(found) == plan.streams * len(plan.positions) * len(SAMPLING) > 100
    assert [each for each in found if each.difference or each.other_logprobs] == []
