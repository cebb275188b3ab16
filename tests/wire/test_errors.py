"""Error codes and finish reasons agree with gRPC and the public API."""

import pytest

from sluice.wire.errors import ErrorCode, Fault, FinishReason


def test_every_error_code_names_a_grpc_status():
    grpc = pytest.importorskip("grpc")
    assert {code.status for code in ErrorCode} <= {status.name for status in grpc.StatusCode}
    assert len({code.value for code in ErrorCode}) == len(ErrorCode)
    assert Fault("FROM_THE_FUTURE", "?").error_code is ErrorCode.INTERNAL


@pytest.mark.parametrize("code", ["INVALID_LOGITS", "PROCESSOR_FAILED", "STEP_FAILED", "POISON", "TEXT_FAILED"])
def test_failures_of_the_server_are_internal_and_not_retried(code):
    """Not the request's: logits that are not finite come from the model or from a processor."""
    assert (ErrorCode[code].status, ErrorCode[code].retry_after) == ("INTERNAL", None)


def test_finish_reasons_are_those_of_the_public_api():
    from sluice.v1 import generation_pb2

    for reason in list(FinishReason)[1:7]:
        assert generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason
