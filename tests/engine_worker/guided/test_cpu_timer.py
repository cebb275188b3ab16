"""The timer of a thread's CPU time."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
from engine_worker.guided.guide_worker import CpuTimer

def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

timer = CpuTimer()
timer.start(0.1)
threads = [threading.Thread(target=work, args=(0.2,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
timer.{last}
work(0.2)
"""


@pytest.mark.parametrize(("last", "status"), [("stop()", 0), ("start(0.1)", -signal.SIGPROF)])
def test_only_the_cpu_time_of_its_own_thread_counts(last, status):
    ended = subprocess.run([sys.executable, "-c", PROGRAM.replace("{last}", last)], timeout=60, check=False)
    assert ended.returncode == status
