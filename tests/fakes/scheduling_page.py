"""The example schedulers, the settings table and the names in docs/scheduling.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"


def example(name: str = "fair") -> str:
    """The source of the example module `name`.py."""
    texts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (text for text in texts if text.startswith(f'"""{name}.py: '))
    return text


def settings() -> set[str]:
    """Names of the settings in the table."""
    table = PAGE.read_text(encoding="utf-8").split("## Settings")[1].split("##")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def code_words(start: str, end: str) -> set[str]:
    """What is set as code between two phrases of the page."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    _, found, rest = text.partition(start)
    part, found_too, _ = rest.partition(end)
    assert found, start
    assert found_too, end
    return set(re.findall(r"`([^`]+)`", part))
