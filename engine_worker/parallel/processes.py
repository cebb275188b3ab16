"""The other ranks as child processes on this machine, which share memory with rank 0."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from engine_worker.parallel.shm_channel import SharedMemory, ShmSender, Wakeup
from sluice.host.process import PARENT_VARIABLE

REAP_SECONDS = 1.0
"""Time to wait for the exit status of a process that is ending."""


class Processes:
    """The children are killed when the thread that started them ends, however this process ends."""

    def __init__(self, size: int, seconds: float, log_level: str) -> None:
        """`seconds`: see `ShmSender`. Raises OSError if a child cannot be started."""
        descriptor = SharedMemory.create(size - 1)
        wakeups = []
        self._children: list[subprocess.Popen[bytes]] = []
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            **os.environ,
            # -P drops the working directory from the module path, so pass on this process's path.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # Rank 0 is a member of the group too.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = environment[name]
        try:
            for rank in range(1, size):
                parent_end, child_end = socket.socketpair()
                wakeups.append(Wakeup(parent_end))
                with child_end:
                    arguments = map(str, (rank, size, descriptor, child_end.fileno(), log_level))
                    self._children.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-m", "engine_worker.parallel.follower", *arguments],
                            stdin=subprocess.DEVNULL,
                            env=environment,
                            # Ctrl-C in the terminal reaches only this process, which then ends the children.
                            process_group=0,
                            pass_fds=(descriptor, child_end.fileno()),
                        )
                    )
            self.sender = ShmSender(SharedMemory(descriptor, size - 1), wakeups, seconds)
        except OSError:
            self.kill()
            raise
        finally:
            os.close(descriptor)

    def exit_reason(self, rank: int) -> str | None:
        """How this rank's process has ended, or ends within REAP_SECONDS; None if it is running."""
        with suppress(subprocess.TimeoutExpired):
            # A closed connection can be noticed before the process has ended: wait a moment for its exit status.
            code = self._children[rank - 1].wait(REAP_SECONDS)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def end(self, seconds: float) -> None:
        """Wait for the children to end; after `seconds`, kill those that are still running."""
        end = time.monotonic() + seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL, which also ends stopped processes, and wait."""
        # Kill all children before the first wait, so that no rank continues alone.
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_SECONDS)
