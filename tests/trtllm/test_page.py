"""The examples in docs/trtllm.md."""

import re
from pathlib import Path

import pytest

from sluice import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "trtllm.md"

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("number", "shown"), [(0, r"\[\d+(, \d+){9}\]\n"), pytest.param(1, r"(?s).+\n.+", marks=pytest.mark.long)]
)
def test_an_example_of_the_page(capsys, number, shown) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[number]
    # The code comes from this repository.
    exec(code, {"checkpoint": str(tiny_model.path())})
    assert re.fullmatch(shown, capsys.readouterr().out)
