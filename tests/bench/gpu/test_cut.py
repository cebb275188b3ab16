"""A run that is interrupted at any time has written a page with its findings so far."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.findings import Findings

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


@pytest.mark.quick(1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("line", "number"),
    [
        pytest.param("", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("cpu …", signal.SIGTERM, marks=pytest.mark.long),
        ("cpu …", signal.SIGKILL),
        ("default path …", signal.SIGINT),
    ],
)
def test_the_page_is_complete_after_an_interruption(tmp_path, line, number):
    """Interrupts the run as soon as the page exists, before torch is imported, or as soon as it prints this line, after
    which it starts a task that takes seconds."""
    page = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "bench.gpu", "first", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not page.exists():
            assert process.poll() is None
            time.sleep(0.05)
        if line:
            assert any(output.rstrip().endswith(line) for output in process.stdout)
    finally:
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode != 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# The GPU engine, measured\n\n")
    assert text.endswith("\n")
    if line:
        assert Findings.load(tmp_path / "gpu.json").doing == line.removesuffix(" …")
        assert f"Incomplete: *{line.removesuffix(' …')}* was running" in text


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    from bench.gpu import findings

    file = tmp_path / "page"
    findings.write_whole(file, "first")
    monkeypatch.setattr(findings.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        findings.write_whole(file, "second")
    assert file.read_text() == "first"
