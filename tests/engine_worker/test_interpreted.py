"""Runs the tests of all Triton kernels, in `interpreted*.py` of the packages, by Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_worker.triton_tools import needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]


@needs_triton
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_all_kernels(which):
    """In a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    files = sorted(map(str, Path(__file__).parent.glob("*/interpreted*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
