"""A user's function for statistics: lines in a file."""

import os


def write(text: str) -> None:
    """One more."""
    with open(os.environ["TOLD_FILE"], "a", encoding="utf-8") as file:
        file.write(text + "\n")
