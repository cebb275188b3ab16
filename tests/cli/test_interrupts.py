"""Ctrl-C during the imports: no output, and the exit status of an interrupted command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.tiny_model import path
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SLOW = """
import pathlib, time
pathlib.Path({marker!r}).touch()
try:
    time.sleep(60)
except KeyboardInterrupt as error:
    raise ImportError("half imported") from error
"""
"""A module whose import turns an interrupt into another exception, as some C extensions do."""


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("sluice", "typer"),
        ("sluice", "rich"),
        ("router", "zmq"),
        ("detok_service", "zmq"),
        ("engine_worker", "zmq"),
        ("engine_worker", "torch"),
    ],
)
def test_an_interrupt_during_imports_is_silent(tmp_path, module, imported) -> None:
    marker = tmp_path / "importing"
    (tmp_path / f"{imported}.py").write_text(SLOW.format(marker=str(marker)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    flags = () if module == "sluice" else ("--model", str(path()), "--listen", f"ipc://{tmp_path}/inbox")
    command = [sys.executable, "-m", module, *flags]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert wait_until(marker.exists, 60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
