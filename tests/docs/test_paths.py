"""All files that the documents name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["docs/architecture.md", "docs/README.md", "CONTRIBUTING.md", "k8s/README.md"]
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()}


def named(line: str) -> list[str]:
    """Full paths, and names of files that follow a path of the same folder in the line."""
    found: list[str] = []
    folder = ""
    for word in re.findall(r"`([\w./]+)`", line):
        if word.split("/")[0] in TOP and "/" in word:
            folder = word.rpartition("/")[0] if word.endswith(".py") else word.rstrip("/")
            found.append(word)
        elif "/" not in word and word.endswith(".py") and folder:
            found.append(f"{folder}/{word}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_named_file_exists(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    missing = [path for line in lines for path in named(line) if not (ROOT / path).exists()]
    assert not missing
