"""Streams over the loss of an engine or its machine, on machines with keepers. `python -m tests.system.hosts.kept` does
the same with the real model."""

import pytest

from bench.harness.models import TINY
from tests.system.hosts.kept import run
from tests.system.hosts.network import missing


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_continue_with_the_blocks_of_other_machines(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    seen = run(tmp_path, TINY, "float32", 600, 300)
    assert [each.text for each in seen if not each.good] == []
    assert [each.fetched > 0 for each in seen] == [True, True, False, True]
