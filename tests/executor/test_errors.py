"""Errors can be sent to another process."""

import pickle

import pytest

from sluice.client import InvalidRequest, RankAnswer, Violation
from sluice.executor import CollectiveRpcError, RequestError
from sluice.launch import RingError
from sluice.llm import UnsupportedNameError
from sluice.trtllm import OptionError, UnsupportedOptionError

INVALID = InvalidRequest("seed: is -1", reason="INVALID", violations=(Violation("seed", "is -1"),), retry_after=2.0)
ERRORS = [
    INVALID,
    RequestError(3, 7, INVALID),
    CollectiveRpcError([RankAnswer(0, 1, None, "no such method")]),
    RingError("engine-0 ended", ["Traceback"]),
    OptionError("is 0"),
    UnsupportedOptionError("Request.x", "it is not implemented"),
    UnsupportedNameError("LLM.score"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickled_and_back(error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    attributes = {name: value for name, value in vars(error).items() if name != "error"}
    assert {name: getattr(copy, name) for name in attributes} == attributes


def test_a_copied_request_error_has_its_cause() -> None:
    copy = pickle.loads(pickle.dumps(RequestError(3, None, INVALID)))
    assert isinstance(copy.error, InvalidRequest)
    assert copy.__cause__ is copy.error
    assert copy.error.violations == INVALID.violations
    assert not copy.retryable
