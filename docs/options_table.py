"""`python -m docs.options_table` rewrites the table of options in docs/reference/client.md."""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

from sluice.client import Options

PAGE = Path(__file__).parent / "reference" / "client.md"
HEAD = "| option | type | meaning |\n| --- | --- | --- |\n"
TYPES = {
    "Any": "tensor, array or mapping",
    "Seconds": "float (seconds) or timedelta",
    "LoraWeights": "result of `read_lora`",
    "KvCache": "dict",
    r"Mapping\[.*?\]": "dict",
    r"Sequence\[(.*)\]": r"list[\1]",
    r"Literal\[(.*)\]": r"\1",
}
"""What users write for a type, by a pattern of its annotation. The patterns are applied in this order."""


def with_table(page: str) -> str:
    """The page with the table of the real options in place of its own."""
    before, _, after = page.partition(HEAD)
    _, _, after = after.partition("\n\n")
    return f"{before}{table()}\n\n{after}"


def table() -> str:
    (tree,) = ast.parse(inspect.getsource(Options)).body
    rows = []
    for statement, following in pairwise(getattr(tree, "body", ())):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(name), annotation=kind), ast.Expr(ast.Constant(str() as text)):
                cells = (f"`{name}`", _type(ast.unparse(kind)), " ".join(text.split()))
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(rows)


def _type(annotation: str) -> str:
    text = annotation.removesuffix(" | None")
    for pattern, replacement in TYPES.items():
        text = re.sub(rf"\b{pattern}", replacement, text)
    return text.replace("'", '"').replace(" | ", " or ")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
