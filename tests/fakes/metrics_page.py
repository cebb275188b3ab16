"""The tables of docs/metrics.md."""

import re
from pathlib import Path

ROW = re.compile(r"^\| `(sluice_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented(prefix: str) -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name, type, labels, text) of each metric whose name starts with `prefix`, in order."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in rows
        if name.startswith(prefix)
    ]
