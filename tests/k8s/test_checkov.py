"""checkov on all objects of all value sets. The exceptions and their reasons are in k8s/README.md.

Needs checkov on the PATH; it has too many dependencies for the development environment: pipx install checkov==3.3.30
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.k8s.chart import CHART, VALUE_SETS, render, values_of

README = CHART.parents[1] / "README.md"
TEST_POD_ONLY = {"CKV_K8S_8", "CKV_K8S_9", "CKV_K8S_35"}

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("checkov") is None, reason="checkov is missing"),
]


def test_only_the_listed_checks_fail(tmp_path: Path) -> None:
    for name in VALUE_SETS:
        (tmp_path / f"{name}.yaml").write_text(render(values_of(name)))
    command = ["checkov", "-d", str(tmp_path), "--framework", "kubernetes", "--compact", "--quiet", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 1000
    failed = {(check["check_id"], check["resource"]) for check in report["results"]["failed_checks"]}
    assert {check for check, _ in failed} <= set(re.findall(r"CKV_K8S_\d+", README.read_text()))
    assert {resource for check, resource in failed if check in TEST_POD_ONLY} == {"Pod.llm.sluice-test"}
