"""The worked example of docs/processors.md: a logits processor, its configuration and its use."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "processors.md"


def example() -> tuple[str, str]:
    """The Python module and the engine's settings on the page."""
    page = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"```python\n# digits.py\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```yaml\n# engine.yaml\n(.*?)```", page, re.DOTALL)
    return module, settings


def calls() -> list[str]:
    """The client's calls on the page, in order."""
    return re.findall(r"^client\.generate\(.*\)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
