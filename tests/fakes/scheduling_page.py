"""The example schedulers and the settings table of docs/scheduling.md."""

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
