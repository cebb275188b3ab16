"""The template process: imports what services import, then forks one service for each order from its socket.

A service spends four seconds of a slow CPU on imports, most of them on torch, and the tests start hundreds of services.
"""

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
from fcntl import F_DUPFD, fcntl

import msgspec

from tests.forks.order import MAX_BYTES, Order

MODULES = (
    "detok_service.__main__",
    "engine_worker.__main__",
    "engine_worker.backend",
    "engine_worker.guided.guides",
    "engine_worker.guided.processes",
    "engine_worker.keeper.__main__",
    "engine_worker.lora.cpu",
    "engine_worker.openvino.load",
    "engine_worker.openvino.trial",
    "engine_worker.pool_files.folder",
    "engine_worker.runner.extensions",
    "gateway.__main__",
    "router.__main__",
    "tokenizers",
    "uvloop",
)
"""What a started service has imported; nothing else, so that a service does not see modules that it would not have."""
FIRST_FREE = 512
"""Above all descriptors that the template has, and that a service is given."""
MAX_DESCRIPTORS = 16
POLL_SECONDS = 0.001


def main(descriptor: int) -> None:
    orders = socket.socket(fileno=descriptor)
    for module in MODULES:
        importlib.import_module(module)
        if module.endswith(".__main__"):
            # A service runs it as a script. runpy would warn if it were imported.
            del sys.modules[module]
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"the imports have started {len(threads) - 1} threads, and a fork would not have them")
    gc.freeze()
    while True:
        data, descriptors, *_ = socket.recv_fds(orders, MAX_BYTES, MAX_DESCRIPTORS)
        if not data:
            return
        order = msgspec.json.decode(data, type=Order)
        pid = _fork(order)
        if pid == 0:
            _become(order, descriptors)
            runpy.run_module(order.module, run_name="__main__", alter_sys=True)
            return
        for each in descriptors:
            os.close(each)
        orders.send(str(pid).encode())


def _fork(order: Order) -> int:
    """0 in the service; here its pid, once it is a child of `order.parent`.

    A process that lies between the two exits, and the kernel gives its child to the nearest ancestor that adopts
    orphans.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        while os.getppid() != order.parent:
            time.sleep(POLL_SECONDS)
        return 0
    os.close(writer)
    with os.fdopen(reader) as pipe:
        pid = int(pipe.read())
    os.waitpid(between, 0)
    return pid


def _become(order: Order, received: list[int]) -> None:
    """What an exec would have done."""
    moved = [fcntl(each, F_DUPFD, FIRST_FREE) for each in received]
    os.closerange(0, FIRST_FREE)
    for source, target in zip(moved, order.descriptors, strict=True):
        os.dup2(source, target)
        os.close(source)
    if order.new_session:
        os.setsid()
    elif order.group >= 0:
        os.setpgid(0, order.group)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]))
