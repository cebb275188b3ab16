import os
import subprocess
import sys

from bench.harness.machine import MachineTimes, descendants

SPIN = "import time\nwhile time.process_time() < {seconds}: pass\nprint('spent', flush=True)\ninput()"


def spinning(seconds: float) -> subprocess.Popen[str]:
    code = SPIN.format(seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_live_and_ended_children_count_as_ours():
    before = MachineTimes.read()
    with spinning(0.3) as lives, spinning(0.3) as ends:
        assert lives.stdout.readline() == ends.stdout.readline() == "spent\n"
        ends.communicate("\n")
        interval = before.until(MachineTimes.read())
        assert lives.pid in descendants(os.getpid())
        lives.communicate("\n")
    # Ticks of 10 ms.
    assert interval.ours * interval.cores * interval.seconds >= 0.55


def test_shares_are_fractions_of_all_cores_and_other_processes_are_foreign(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = MachineTimes(at=10.0, busy=100.0, steal=5.0, ours=50.0)
    interval = before.until(MachineTimes(at=20.0, busy=130.0, steal=7.0, ours=60.0))
    assert (interval.steal, interval.ours, interval.foreign) == (0.05, 0.25, 0.5)


def test_foreign_time_is_not_negative_if_our_ticks_exceed_the_total():
    before = MachineTimes(0.0, 1.0, 0.0, 1.0)
    assert before.until(MachineTimes(1.0, 1.5, 0.0, 1.6)).foreign == 0.0
