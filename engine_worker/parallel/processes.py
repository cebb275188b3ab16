"""The other ranks as child processes on this machine, with the shared memory between them and rank 0."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from engine_worker.parallel.shm_channel import SharedMemory, ShmSender, Wakeup
from sluice.ring.process import PARENT_VARIABLE

REAP_SECONDS = 1.0


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
            # -P drops the working directory from the path, so pass on wherever this process imports from.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # Rank 0 is a member of the group as well.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = environment[name]
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                wakeups.append(Wakeup(ours))
                with theirs:
                    arguments = map(str, (rank, size, descriptor, theirs.fileno(), log_level))
                    self._children.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-m", "engine_worker.parallel.follower", *arguments],
                            stdin=subprocess.DEVNULL,
                            env=environment,
                            # Ctrl-C in the terminal goes to this process only, which then ends the children.
                            process_group=0,
                            pass_fds=(descriptor, theirs.fileno()),
                        )
                    )
            self.sender = ShmSender(SharedMemory(descriptor, size - 1), wakeups, seconds)
        except OSError:
            self.kill()
            raise
        finally:
            os.close(descriptor)

    def exit_reason(self, rank: int) -> str | None:
        """How this rank's process has ended, or is about to; None if it runs on."""
        with suppress(subprocess.TimeoutExpired):
            # A closed connection can be noticed before the process has ended: wait a moment for its exit status.
            code = self._children[rank - 1].wait(REAP_SECONDS)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def end(self, seconds: float) -> None:
        """Wait for the children to end; kill those that have not after `seconds`."""
        end = time.monotonic() + seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """SIGKILL, which ends stopped processes too."""
        # All of them before the first wait: none shall go on without the others.
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_SECONDS)
