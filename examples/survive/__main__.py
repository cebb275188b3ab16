"""Kills the services of a stream while it runs: python -m examples.survive. Exits with 1 if its text changes."""

import sys

from rich.console import Console

from examples.survive.demo import survive

if __name__ == "__main__":
    sys.exit(not survive(Console()))
