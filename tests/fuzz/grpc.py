"""Send mutated messages to every method of a router's gRPC port: `python -m tests.fuzz.grpc --messages 100000`.

Runs tests/router/test_fuzz.py with more messages.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    os.environ["SLUICE_FUZZ_MESSAGES"] = str(parser.parse_args().messages)
    sys.exit(pytest.main([str(Path(__file__).parents[1] / "router" / "test_fuzz.py")]))


if __name__ == "__main__":
    main()
