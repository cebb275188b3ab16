"""The contents of the default image, by the extras that it is built with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTING = re.compile(r"^\| `(\w+)` \|.*Needs the extra `(\w+)`", re.MULTILINE)


def extras() -> set[str]:
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "k8s/Containerfile").read_text(), re.MULTILINE)
    return set(default.split(","))


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras() <= project["optional-dependencies"].keys()


def test_no_setting_needs_more_than_the_image_has():
    needed = dict(SETTING.findall((ROOT / "docs/settings.md").read_text()))
    assert needed["otlp_endpoint"] == "otel"
    assert set(needed.values()) <= extras()
