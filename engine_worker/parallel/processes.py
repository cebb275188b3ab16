"""The other ranks as child processes, and the ring between them and this one."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from engine_worker.parallel.shm_channel import Memory, RingWriter
from engine_worker.parallel.wakeup import Bell
from sluice.ring.process import PARENT_VARIABLE

REAP_SECONDS = 1.0


class Processes:
    """They die with this process, or rather with the thread that starts them, however it ends."""

    def __init__(self, size: int, seconds: float, log_level: str) -> None:
        """`seconds`: in which a full ring must get room. Raises OSError where they cannot be started."""
        descriptor = Memory.create(size - 1)
        bells = []
        self._children: list[subprocess.Popen[bytes]] = []
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            **os.environ,
            # With -P, and from wherever this process imports.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # This process is one of them.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = environment[name]
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                bells.append(Bell(ours))
                with theirs:
                    words = map(str, (rank, size, descriptor, theirs.fileno(), log_level))
                    self._children.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-m", "engine_worker.parallel.follower", *words],
                            stdin=subprocess.DEVNULL,
                            env=environment,
                            # Ctrl-C in the terminal is for this process, which then ends them.
                            process_group=0,
                            pass_fds=(descriptor, theirs.fileno()),
                        )
                    )
            self.sender = RingWriter(Memory(descriptor, size - 1), bells, seconds)
        except OSError:
            self.kill()
            raise
        finally:
            os.close(descriptor)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and on."""
        return [child.pid for child in self._children]

    def ending(self, rank: int) -> str | None:
        """How this one ended, in words; of one that is about to end too."""
        with suppress(subprocess.TimeoutExpired):
            code = self._children[rank - 1].wait(REAP_SECONDS)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def end(self, seconds: float) -> None:
        """Wait until they have ended, and kill those that have not by then."""
        end = time.monotonic() + seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """At once, those that stand still too."""
        for child in self._children:
            child.kill()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REAP_SECONDS)
