"""Alerts: their metrics exist, promtool accepts them, and each fires in one case and is silent in another."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.chart import CHART

RULES = CHART / "files" / "rules.yaml"
CASES = Path(__file__).parent / "rules_test.yaml"
METRICS_PAGE = CHART.parents[2] / "docs" / "metrics.md"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is missing")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_metrics_of_the_rules_exist(alert: dict[str, str]) -> None:
    # tests/docs compares that page with the services' registries.
    known = set(re.findall(r"`(sluice_\w+)`", METRICS_PAGE.read_text()))
    text = alert["expr"]
    choice = re.search(r"\((\w+(?:\|\w+)+)\)", text)
    texts = [text.replace(choice[0], name) for name in choice[1].split("|")] if choice else [text]
    names = {name.removesuffix("_bucket") for text in texts for name in re.findall(r"sluice_\w+", text)}
    assert names
    assert names <= known


def test_every_alert_has_a_case() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    tested = [each["alertname"] for case in cases for each in case["alert_rule_test"]]
    assert tested == [alert["alert"] for alert in ALERTS]


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_in_one_case_and_is_silent_in_the_other(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    cases.write_text(CASES.read_text().replace("RULES", str(RULES)))
    done = subprocess.run(["promtool", "test", "rules", str(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
