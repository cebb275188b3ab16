"""Streams with long contexts whose engine dies, freezes or drains. `python -m bench takeover` measures the pauses."""

import pytest

from bench.harness.pool_files import OFF, ON
from bench.takeover.takeover_page import TOPIC
from bench.takeover.takeovers import CASES, measure
from sluice.settings.engine import OPENVINO_BLOCK

IN_FLIGHT = 16
"""Tokens that may be computed beyond those in a partly filled block: of steps that had not ended."""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_with_long_contexts_continue_as_if_nothing_had_happened(tmp_path):
    plan = TOPIC.quick
    result = measure(plan, tmp_path, lambda *_: None)
    assert {(run.case, run.kv) for run in result.runs} == {(case, kv) for case in CASES for kv in (OFF, ON)}
    assert [run.difference for run in result.runs if run.difference] == []
    for run in result.runs:
        assert run.first_token > 0
        assert run.pause > 0
    assert [run for run in result.of(kv=ON) if not run.same_bits] == []
    limits = {name: case.strikes * (OPENVINO_BLOCK + IN_FLIGHT) for name, case in CASES.items()}
    assert [run for run in result.of(kv=ON) if run.recomputed > limits[run.case]] == []
    # Without pool files, everything that the first engine had computed is computed again.
    assert [run for run in result.of(kv=OFF) if run.recomputed < run.prompt] == []
