"""Settings of scheduling: what makes no sense is told with its name, its value and why."""

import pytest

from engine_worker.config import read_settings
from engine_worker.scheduling.build import SchedulerNames


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--capacity-scheduler-policy", "best"], r"capacity_scheduler_policy: .*static_batch or module:Class.*'best'"),
        (["--micro-batch-scheduler", "mine"], r"micro_batch_scheduler: .*form module:Class.*'mine'"),
        (["--scheduler", "mine"], r"scheduler: .*form module:Class.*'mine'"),
        (["--scheduler", "a:B", "--micro-batch-scheduler", "a:C"], r"scheduler: .*give it or them.*'a:B'"),
        (["--scheduler", "a:B", "--capacity-scheduler-policy", "static_batch"], r"scheduler: .*give it or them.*'a:B'"),
        (["--context-chunking-policy", "fair"], r"context_chunking_policy: .*equal_progress.*'fair'"),
        (["--no-chunked-context", "--context-chunking-policy", "equal_progress"], r"nothing without chunked_context"),
        (["--priority-aging-seconds", "-1"], r"priority_aging_seconds: .*greater than or equal to 0.*-1"),
    ],
)
def test_wrong_settings(flags, message):
    with pytest.raises(SystemExit, match=message):
        read_settings(["--model", "model", *flags])


def test_from_a_file(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("model: model\ncapacity_scheduler_policy: mine:Own\npriority_aging_seconds: 0\n")
    settings = read_settings(["--config", str(file)])
    assert settings.schedulers == SchedulerNames("mine:Own")
    assert settings.priority_aging_seconds == 0
