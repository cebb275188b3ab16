"""Records the demo as a picture for the README: python -m examples.survive.record docs/images/survive.svg."""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from examples.survive.demo import survive

WIDTH = 100
FONT_DOWNLOADS = re.compile(r"\n *@font-face \{[^}]*\}")


def record(path: Path) -> None:
    """Run the demo, and save a picture of its output. Raises RuntimeError if the text changed."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    if not survive(console):
        raise RuntimeError(console.export_text())
    # A fixed id, or every recording would change every line of the file.
    picture = console.export_svg(title="make survive", unique_id="survive")
    path.write_text(FONT_DOWNLOADS.sub("", picture), encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
