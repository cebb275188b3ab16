"""Details of a failed call, within the limits of gRPC clients."""

import base64

import pytest
from google.rpc import error_details_pb2

from router.errors import Reason, RequestError, Violation, Violations

MAX_METADATA_BYTES = 8192


def info(error: RequestError) -> error_details_pb2.ErrorInfo:
    error_info = error_details_pb2.ErrorInfo()
    assert error.status().details[0].Unpack(error_info)
    return error_info


def test_each_field_has_its_reason():
    bad = Violations()
    bad.token_ids("ids", [3, 99], 10)
    bad.at_most("words", 7, 3, "words")
    bad.add("name", "is empty", reason=Reason.MISSING)
    bad.add("name", "is strange as well")
    with pytest.raises(RequestError) as raised:
        bad.raise_if_any()
    assert info(raised.value).metadata == {"ids[1]": "OUT_OF_RANGE", "words": "TOO_MANY", "name": "MISSING"}


def test_other_metadata_is_kept():
    error = RequestError.invalid([Violation("n", "is 0", reason=Reason.OUT_OF_RANGE)])
    error.metadata["engine_deaths"] = "1"
    assert info(error).metadata == {"n": "OUT_OF_RANGE", "engine_deaths": "1"}


def test_many_violations_fit():
    error = RequestError.invalid([Violation(f"spec.messages[{i}].content", "is bad " * 20) for i in range(1000)])
    status = error.status()
    assert len(base64.b64encode(status.SerializeToString())) < MAX_METADATA_BYTES - 1024
    assert 10 < len(info(error).metadata) < 1000
