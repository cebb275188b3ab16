"""The README's comparison table: claims about other systems have sources, claims about Sluice have commands."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
LINK = re.compile(r"\]\((https://[^\s)]+)\)")


def rows() -> list[list[str]]:
    lines = (line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_claim_has_its_source_or_command() -> None:
    head, _, *found = rows()
    assert head == ["", "Sluice", "vLLM", "SGLang", "TGI", "TensorRT-LLM"]
    assert len(found) > 5
    for topic, ours, *others in found:
        assert re.search(r"`[^`]+`", ours), topic
        assert all(map(LINK.search, others)), topic
