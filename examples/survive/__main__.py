"""Kills the services of a ring under a stream: python -m examples.survive. Status 1 if the text is another one."""

import sys

from rich.console import Console

from examples.survive.demo import survive

if __name__ == "__main__":
    sys.exit(not survive(Console()))
