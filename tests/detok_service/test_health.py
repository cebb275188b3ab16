"""When a detokenizer is ready, and when it is not."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import structlog
import zmq

from detok_service.__main__ import MAX_MESSAGES, serve, unready
from detok_service.decoders import load_decoders
from detok_service.service import Detokenizer, Identity
from sluice.lanes.lane import Lane
from sluice.settings.services import DetokenizerSettings
from sluice.telemetry.probes import Health
from sluice.telemetry.service_status import ProgressBeacon, StatusFile
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.params import TextParams
from sluice.wire.rows import Open, TokenBatch
from tests.fakes.lane import MemoryLane
from tests.fakes.lanes import connected
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, wait_until
from tests.fakes.tokenizers import TINY


class Flood:
    """An inbox that always holds more messages than one read returns, until the test ends."""

    ended = False

    @property
    def waiting(self) -> bool:
        return not self.ended

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))

    def receive(self, limit: int) -> list[KeepAlive]:
        return [] if self.ended else [KeepAlive("engine", 1)] * limit

    gaps = malformed = 0


def test_a_persistent_backlog_makes_the_detokenizer_unready():
    inbox, loop = Flood(), ProgressBeacon()
    decoders = load_decoders(TINY / "tokenizer.json")
    service = Detokenizer(Identity("detok", 1, "here"), decoders, MemoryLane, 10, structlog.get_logger())
    settings = DetokenizerSettings(model="nowhere", drain_timeout=0)
    health = Health(loop, 60.0, 0.5, lambda: unready(service))
    thread = threading.Thread(
        target=serve, args=(service, inbox, settings, loop, StatusFile({}), structlog.get_logger())
    )
    thread.start()
    try:
        assert MAX_MESSAGES > 1
        assert wait_until(lambda: (health.not_ready() or "").startswith("there is work, but no progress for"))
        assert health.dead() is None
        inbox.ended = True
        assert wait_until(lambda: health.not_ready() is None)
    finally:
        service.drain()
        thread.join(LIMIT)
    # The loop has ended: soon the health endpoints would report that.
    assert unready(service) == "it is draining"


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.process
def test_a_draining_process_is_alive_but_not_ready(tmp_path):
    port = free_ports(1)
    command = [sys.executable, "-m", "detok_service", "--model", str(TINY), "--listen", f"ipc://{tmp_path}/detok"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    context = zmq.Context()
    with subprocess.Popen([*command, "--metrics-port", str(port)], stderr=subprocess.PIPE, env=environment) as process:
        try:
            ready = json.loads(process.stderr.readline())
            assert probe(port, "/readyz") == probe(port, "/livez") == (200, "ok\n")
            lane = connected(Lane(context, ready["address"]))
            router = f"ipc://{tmp_path}/router"

            def shows(path: str, answer: tuple[int, str]) -> bool:
                # While draining, a router that is silent for some seconds counts as lost, and the process would exit.
                lane.send(Hello("router", router))
                return probe(port, path) == answer

            assert lane.send(Hello("router", router))
            assert lane.send(TokenBatch.of("engine", 1, [Open(1, 1, 1, TextParams(), router, 1, 0)], []))
            with_stream = "sluice_detok_streams 1.0"
            assert wait_until(lambda: with_stream in probe(port, "/metrics")[1])
            process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: shows("/readyz", (503, "it is draining\n")))
            assert wait_until(lambda: shows("/livez", (200, "ok\n")))
        finally:
            process.kill()
            lane.close()
            context.destroy()
