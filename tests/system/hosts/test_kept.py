"""Streams over the loss of an engine or its machine, on machines with keepers. `python -m tests.system.hosts.kept` does
the same with the real model."""

import pytest

from bench.harness.models import TINY
from tests.system.hosts.kept import run
from tests.system.hosts.kept_page import Seen, page
from tests.system.hosts.network import missing


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_continue_with_the_blocks_of_other_machines(tmp_path):
    """Among them streams that are handed over from a prefill engine to a decode engine, either of which is killed."""
    if reason := missing():
        pytest.skip(reason)
    seen = list(run(tmp_path, TINY, "float32", 1200, 700))
    assert [each.text for each in seen if not each.good] == []
    # If the machine is lost, nothing is left to copy. What a killed prefill engine has left depends on the moment.
    *copied, _, decode_killed = seen
    assert [each.case for each in (*copied, decode_killed) if not each.fetched] == ["machine lost"]


def test_the_page_has_percentiles_of_each_case():
    killed = [Seen("killed", 2.0, pause, 9, 48, 125, "", True) for pause in (0.5, 0.7)]
    found = {"int8, 4,000 tokens": [*killed, Seen("lost", 2.0, 20.0, 5000, 4160, 0, "text", False)]}
    text = page(found, [])
    assert "| int8, 4,000 tokens | streams | pause, s |" in text
    assert "| killed | 2 | 0.60 · 0.70 | 2.00 · 2.00 | 9 (48) | 125 | 0 | 0 |" in text
    assert "| lost | 1 | 20.0 · 20.0 | 2.00 · 2.00 | 5,000 (4,160) | 0 | 1 | 1 |" in text
    assert "3 streams, of which 1 failed, differed" in text
