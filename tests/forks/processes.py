"""`subprocess.Popen` that starts our services as forks of the template process, and everything else as always."""

import ctypes
import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.forks.order import Order

SERVICES = ("detok_service", "engine_worker", "engine_worker.keeper", "gateway", "router")
ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
FREE_VARIABLES = ("OMP_WAIT_POLICY", "PYTEST_CURRENT_TEST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables in which a service may differ from the template, besides its settings. A fork whose command
does not have the first one waits passively all the same."""
PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Template:
    """Starts the template process with the first service. It ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # As launchers set it for their services.
        self._environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}

    def service(self, command: Sequence[Any], environment: Mapping[str, str]) -> tuple[str, list[str]] | None:
        """Module and arguments, if a fork equals what this command starts."""
        words = [os.fspath(word) for word in command]
        if words[1:2] == ["-P"]:
            del words[1]
        is_service = len(words) > 2 and words[:2] == [sys.executable, "-m"] and words[2] in SERVICES
        if sys.platform != "linux" or not is_service or _imported(environment) != _imported(self._environment):
            return None
        return words[2], words[3:]

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
                [sys.executable, "-m", "tests.forks.template", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                process_group=0,
            )
        return ours


def popen_of(template: Template) -> "type[subprocess.Popen[Any]]":
    class Popen(subprocess.Popen[Any]):
        def _execute_child(self, args: Any, *others: Any) -> None:
            given = PARAMETERS.bind(self, args, *others).arguments
            environment = dict(os.environ if given["env"] is None else given["env"])
            is_text = given["shell"] or isinstance(args, str | bytes | os.PathLike)
            service = None if is_text else template.service(args, environment)
            if service is None:
                super()._execute_child(args, *others)  # type: ignore[misc]
                return
            streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            sent = {number: number if ours == -1 else ours for number, ours in enumerate(streams)}
            sent.update((number, number) for number in given["pass_fds"])
            order = Order(
                module=service[0],
                arguments=service[1],
                environment=environment,
                folder=os.fspath(given["cwd"] or os.getcwd()),
                parent=os.getpid(),
                descriptors=list(sent),
                new_session=given["start_new_session"],
                group=given["process_group"],
            )
            self.pid = template.start(order, list(sent.values()))
            self._child_created = True
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]

    return Popen


def _imported(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an import may read. This checkout is on Python's path in any case."""
    read = {
        name: value
        for name, value in environment.items()
        if not name.startswith("SLUICE_") and name not in FREE_VARIABLES
    }
    folders = [folder for folder in read.pop("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(ROOT))]
    return {**read, "PYTHONPATH": os.pathsep.join(folders)}


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
