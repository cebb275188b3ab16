"""`subprocess.Popen` that starts our services as forks of the template process, and everything else as always."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sluice.launch.environment import child_environment
from tests.forks.order import Order

SERVICES = ("detok_service", "engine_worker", "engine_worker.keeper", "gateway", "router")
ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
FREE_VARIABLES = ("OMP_WAIT_POLICY", "PYTEST_CURRENT_TEST")
"""Environment variables in which a service may differ from the template, besides its settings: no import reads them."""


class Template:
    """Starts the template process with the first service. It ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = child_environment()
        self._imported = (_imported(os.environ), _imported(self._environment))

    def fits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork equals what this command starts."""
        return sys.platform == "linux" and _service(command) is not None and _imported(environment) in self._imported

    def start(self, order: Order, descriptors: Sequence[int]) -> int:
        """The pid of the service, which is a child of this process."""
        with self._lock:
            if self._orders is None:
                self._orders = self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(self._orders, [msgspec.json.encode(order)], descriptors)
                answer = self._orders.recv(100)
            finally:
                _adopt_orphans(False)
        if not answer:
            raise RuntimeError("the template process has ended")
        return int(answer)

    def close(self) -> None:
        if self._orders is not None and self._process is not None:
            self._orders.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.forks.template", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                process_group=0,
            )
        return ours


def popen_of(template: Template) -> "type[subprocess.Popen[Any]]":
    class Popen(subprocess.Popen[Any]):
        def _execute_child(
            self,
            args: Any,
            executable: Any,
            preexec_fn: Any,
            close_fds: bool,
            pass_fds: Sequence[int],
            cwd: Any,
            env: Mapping[str, str] | None,
            startupinfo: Any,
            creationflags: int,
            shell: bool,
            p2cread: int,
            p2cwrite: int,
            c2pread: int,
            c2pwrite: int,
            errread: int,
            errwrite: int,
            restore_signals: bool,
            gid: Any,
            gids: Any,
            uid: Any,
            umask: int,
            start_new_session: bool,
            process_group: int,
        ) -> None:
            environment = dict(os.environ if env is None else env)
            if shell or isinstance(args, str | bytes | os.PathLike) or not template.fits(args, environment):
                super()._execute_child(  # type: ignore[misc]
                    args,
                    executable,
                    preexec_fn,
                    close_fds,
                    pass_fds,
                    cwd,
                    env,
                    startupinfo,
                    creationflags,
                    shell,
                    p2cread,
                    p2cwrite,
                    c2pread,
                    c2pwrite,
                    errread,
                    errwrite,
                    restore_signals,
                    gid,
                    gids,
                    uid,
                    umask,
                    start_new_session,
                    process_group,
                )
                return
            streams = {0: p2cread, 1: c2pwrite, 2: errwrite}
            sent = {number: number if ours == -1 else ours for number, ours in streams.items()}
            sent.update((number, number) for number in pass_fds)
            module, arguments = _service(args) or ("", [])
            order = Order(
                module=module,
                arguments=arguments,
                environment=environment,
                folder=os.fspath(cwd or os.getcwd()),
                parent=os.getpid(),
                descriptors=list(sent),
                new_session=start_new_session,
                group=process_group,
            )
            self.pid = template.start(order, list(sent.values()))
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    return Popen


def _service(command: Sequence[Any]) -> tuple[str, list[str]] | None:
    """Module and arguments, if the command starts a service with this interpreter."""
    words = [os.fspath(word) for word in command]
    if words[1:2] == ["-P"]:
        del words[1]
    if len(words) < 3 or words[:2] != [sys.executable, "-m"] or words[2] not in SERVICES:
        return None
    return words[2], words[3:]


def _imported(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an import may read."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLUICE_") and name not in FREE_VARIABLES
    }


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
