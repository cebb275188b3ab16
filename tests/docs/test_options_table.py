"""The table of options in docs/reference/client.md is that of the client's real options."""

import re

from docs.options_table import PAGE, table, with_table
from sluice.client import Options


def test_the_page_has_the_table_as_generated():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m docs.options_table"


def test_every_option_has_a_type_and_a_meaning():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", table(), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(Options.__annotations__)
    types = {name: kind for name, kind, _ in rows}
    assert (types["stop"], types["logprobs"], types["priority"]) == (
        "str or list[str]",
        "int",
        '"low", "normal", "high"',
    )
    assert not re.search(r"Sequence|Mapping|Any|None", "".join(types.values()))
