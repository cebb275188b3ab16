"""Settings of scheduling: what makes no sense is rejected with its name, its value and why."""

import pytest

from engine_worker.scheduling.build import POLICIES
from sluice.settings.engine import CAPACITY_POLICIES
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--capacity-scheduler-policy", "best"], r"capacity_scheduler_policy: .*static_batch or module:Class.*'best'"),
        (["--micro-batch-scheduler", "mine"], r"micro_batch_scheduler: .*form module:Class.*'mine'"),
        (["--scheduler", "mine"], r"scheduler: .*form module:Class.*'mine'"),
        (["--scheduler", "a:B", "--micro-batch-scheduler", "a:C"], r"scheduler: cannot be combined with .*'a:B'"),
        (
            ["--scheduler", "a:B", "--capacity-scheduler-policy", "static_batch"],
            r"scheduler: cannot be combined with .*'a:B'",
        ),
        (["--context-chunking-policy", "fair"], r"context_chunking_policy: .*equal_progress.*'fair'"),
        (
            ["--no-chunked-context", "--context-chunking-policy", "equal_progress"],
            r"_policy: has no effect",
        ),
        (["--priority-aging-seconds", "-1"], r"priority_aging_seconds: .*greater than or equal to 0.*-1"),
    ],
)
def test_wrong_settings(flags, message):
    with pytest.raises(SystemExit, match=message):
        load_settings(EngineSettings, ["--model", "model", *flags])


def test_from_a_file(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("model: model\ncapacity_scheduler_policy: mine:Own\npriority_aging_seconds: 0\n")
    settings = load_settings(EngineSettings, ["--config", str(file)])
    assert settings.capacity_scheduler_policy == "mine:Own"
    assert settings.priority_aging_seconds == 0


def test_every_policy_is_a_setting():
    assert tuple(POLICIES) == CAPACITY_POLICIES
