"""The schedulers that docs/scheduling.md works out."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"


def example(name: str = "fair") -> str:
    """The module's text, as it stands on the page."""
    texts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (text for text in texts if text.startswith(f'"""{name}.py: '))
    return text


def settings() -> set[str]:
    """The settings that the page lists."""
    table = PAGE.read_text(encoding="utf-8").split("## Settings")[1].split("##")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
