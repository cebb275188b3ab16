"""HTTP gateways that restart and die while clients send requests. The gateways are real processes."""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import httpx
import pytest

from sluice.launch import Ring
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CLIENTS = 4
END = "data: [DONE]"


class Traffic:
    """Clients that send one request after another. Half of the clients keep their connection."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = f"{url}/v1/completions"
        self._body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i % 2 == 0,)) for i in range(CLIENTS)]

    @property
    def total(self) -> int:
        return self.outcomes.total()

    @contextmanager
    def flowing(self) -> Iterator["Traffic"]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join(LIMIT)

    def request(self, client: httpx.Client, stream: bool) -> str:
        try:
            with client.stream("POST", self._url, json=self._body | {"stream": stream}) as answer:
                lines = [line for line in answer.iter_lines() if line]
        except httpx.HTTPError as error:
            return repr(error)
        return "ok" if answer.status_code == 200 and (lines[-1] == END or not stream) else f"{answer} {lines[-1]}"

    def _run(self, keep: bool) -> None:
        client = httpx.Client(timeout=LIMIT)
        for stream in cycle((True, False)):
            if self._stopped.is_set():
                break
            if not keep:
                client.close()
                client = httpx.Client(timeout=LIMIT)
            self.outcomes[self.request(client, stream)] += 1
        client.close()

    def with_new_connections(self, count: int) -> set[str]:
        outcomes = set()
        for _ in range(count):
            with httpx.Client(timeout=LIMIT) as client:
                outcomes.add(self.request(client, stream=True))
        return outcomes


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_no_request_fails_while_the_only_gateway_restarts(fake, tmp_path) -> None:
    port = free_ports(2)
    with Ring(port=port, http_port=port + 1, max_failed_starts=1, **fake) as ring:
        with Traffic(f"http://{ring.http_address}", 8).flowing() as traffic:
            assert wait_until(lambda: traffic.total > CLIENTS)
            ring.restart("gateway")
            before = traffic.total
            assert wait_until(lambda: traffic.total > before + CLIENTS)
        assert set(traffic.outcomes) == {"ok"}

        # Without a gateway that will be started again, connections are refused. A requested restart opens the port.
        (tmp_path / "gateway.do").write_text("die")
        os.kill(ring.pids["gateway"], signal.SIGKILL)
        assert wait_until(lambda: refused(port + 1))
        (tmp_path / "gateway.do").unlink()
        ring.restart("gateway")
        assert traffic.with_new_connections(1) == {"ok"}

        ring.stop()
        assert refused(port + 1)


@pytest.mark.long
def test_two_gateways_while_every_service_restarts() -> None:
    port = free_ports(2)
    with Ring(port=port, http_port=port + 1, gateways=2, engines=2) as ring:
        with Traffic(f"http://{ring.http_address}", 64).flowing() as traffic:
            assert wait_until(lambda: traffic.total > CLIENTS)
            pids = set(ring.pids.values())
            ring.restart_all()
            before = traffic.total
            assert wait_until(lambda: traffic.total > before + CLIENTS)
        assert not pids & set(ring.pids.values())
        assert set(traffic.outcomes) == {"ok"}

        for name in ("gateway-0", "gateway-1"):
            pid = ring.pids[name]
            os.kill(pid, signal.SIGKILL)
            assert wait_until(lambda: not is_alive(pid))  # noqa: B023
            assert traffic.with_new_connections(20) == {"ok"}
            assert wait_until(lambda: ring.pids[name] != pid and is_alive(ring.pids[name]))  # noqa: B023
