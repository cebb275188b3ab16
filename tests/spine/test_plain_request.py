"""A plain request enters no more files, functions and lines than recorded: what it enters may only shrink.

A new feature is a rib: a request that does not use it does not enter its files.
"""

import pytest

from tests.spine import record
from tests.spine.trace import Way, ways

pytestmark = pytest.mark.process

SLACK = 1.01
"""Which branches a step takes depends a little on timing."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Way]:
    return ways()


@pytest.mark.parametrize("border", ["gRPC", "HTTP"])
def test_a_plain_request_enters_what_is_recorded(measured, border):
    now, recorded = measured[border], record.read()[border]
    added = sorted(set(now.files).difference(recorded.files))
    assert not added, f"a plain request enters {added} now"
    left = sorted(set(recorded.files).difference(now.files))
    assert not left, f"a plain request no longer enters {left}: record it by `python -m tests.spine`"
    for name in ("functions", "executed_lines", "source_lines"):
        assert getattr(now, name) <= SLACK * getattr(recorded, name), name
