"""Faults reported by engines reach the client with the invalid field."""

from router.requests.dispatcher import error_of
from sluice.wire.errors import ErrorCode, Fault


def test_a_field_becomes_a_violation_that_is_not_logged():
    error = error_of(Fault(ErrorCode.GUIDE_TOO_COMPLEX.name, "takes too long", "spec.guided.regex"))
    assert (error.code, error.message) == (ErrorCode.GUIDE_TOO_COMPLEX, "spec.guided.regex: takes too long")
    assert [violation.field for violation in error.violations] == ["spec.guided.regex"]
    assert "takes" not in error.loggable


def test_without_a_field_there_is_only_the_message():
    error = error_of(Fault("STEP_FAILED", "see the log"))
    assert (error.code, error.message, error.violations) == (ErrorCode.STEP_FAILED, "see the log", ())
    assert error.loggable == "see the log"


def test_an_unknown_code_is_internal():
    assert error_of(Fault("NEW", "x")).code is ErrorCode.INTERNAL
