"""The values in k8s/README.md are accepted, and render."""

import re

import pytest
import yaml

from tests.k8s.chart import CHART, kinds, objects_from

README = (CHART.parents[1] / "README.md").read_text(encoding="utf-8")
VALUES = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", VALUES, ids=lambda text: text.split(":")[0])
def test_values_of_the_readme_render(text: str) -> None:
    assert kinds(objects_from(yaml.safe_load(text)), "Deployment")


def test_each_alert_is_in_its_table() -> None:
    rules = (CHART / "files" / "rules.yaml").read_text()
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"\bSluice[A-Z]\w+", README))
