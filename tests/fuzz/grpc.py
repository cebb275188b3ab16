"""Mutated messages into every method of a router's gRPC port: `python -m tests.fuzz.grpc --messages 100000`.

The same as tests/router/test_fuzz.py, for longer.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    os.environ["SLUICE_FUZZ_MESSAGES"] = str(parser.parse_args().messages)
    sys.exit(pytest.main([str(Path(__file__).parents[1] / "router" / "test_fuzz.py")]))


if __name__ == "__main__":
    main()
