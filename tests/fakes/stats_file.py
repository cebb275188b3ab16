"""A statistics callback that appends each report as a line to a file."""

import os


def write(text: str) -> None:
    with open(os.environ["STATS_FILE"], "a", encoding="utf-8") as file:
        file.write(text + "\n")
