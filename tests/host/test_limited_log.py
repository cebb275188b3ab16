"""A peer cannot fill the log."""

import structlog
from structlog.testing import capture_logs

from sluice.host.limited_log import INTERVAL_SECONDS, MAX_LINES, LimitedLog


def test_lines_per_event_and_interval_are_limited_and_the_next_line_has_the_number_of_missing_ones():
    now = [0.0]
    with capture_logs() as logs:
        log = LimitedLog(structlog.get_logger(), lambda: now[0])
        for i in range(MAX_LINES + 5):
            log.warning("lost", i=i)
        log.info("other")
        now[0] += INTERVAL_SECONDS
        log.warning("lost", i=-1)
        log.warning("lost", i=-2)
    lost = [line for line in logs if line["event"] == "lost"]
    assert [line["i"] for line in lost] == [*range(MAX_LINES), -1, -2]
    assert [line.get("suppressed") for line in lost] == [None] * MAX_LINES + [5, None]
    assert [line["event"] for line in logs].count("other") == 1
