"""All files that the documents name exist, and docs/where.md leads to every table of files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
# trtllm.md names files of other repositories.
PAGES = [*(page for page in DOCS if page.name != "trtllm.md"), ROOT / "CONTRIBUTING.md", ROOT / "k8s" / "README.md"]
FILES_OF_FEATURE = "\n## Where it lives\n"
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_named_file_exists(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    missing = [path for line in lines for path in named(line) if not (ROOT / path).exists()]
    assert not missing


def test_where_links_the_files_of_every_feature():
    linked = re.findall(r"\((\w+\.md)#where-it-lives\)", (ROOT / "docs" / "where.md").read_text(encoding="utf-8"))
    assert sorted(linked) == [page.name for page in DOCS if FILES_OF_FEATURE in page.read_text(encoding="utf-8")]
