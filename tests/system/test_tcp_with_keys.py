"""A real ring over tcp with keys: each service has only the keys that it needs, and keys are rotated."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from sluice import tiny_model
from sluice.client import Client, SluiceError
from sluice.lanes.keys import ROLES, Role, generate, retire
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, wait_until

pytestmark = pytest.mark.timeout(300)

MODULES = {"router": "router", "engine": "engine_worker", "detok": "detok_service"}


class Service:
    """A process with a separate key folder. `ready`: its log line of that name."""

    def __init__(self, folder: Path, role: Role, keys: Path, *flags: str) -> None:
        self.keys = folder / f"keys-{role}"
        (self.keys / "secret").mkdir(parents=True)
        shutil.copy(keys / "secret" / f"{role}.key", self.keys / "secret")
        shutil.copytree(keys / "public", self.keys / "public")
        command = [sys.executable, "-m", MODULES[role], "--model", str(tiny_model.path()), "--id", role]
        command += ["--listen", "tcp://127.0.0.1:*", "--keys", str(self.keys), *flags]
        self.log = folder / f"{role}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        assert wait_until(lambda: self.events("ready") or self.process.poll() is not None)
        self.ready = self.events("ready")[0]

    def events(self, name: str) -> list[dict]:
        """Log lines of this event."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]

    def copy_keys(self, keys: Path, *files: str) -> None:
        """Replace key files atomically, as an operator's tool does."""
        for file in files:
            shutil.copy(keys / file, self.keys / "new")
            (self.keys / "new").replace(self.keys / file)


@pytest.fixture
def keys(tmp_path):
    for role in ROLES:
        generate(tmp_path / "keys", role)
    return tmp_path / "keys"


@pytest.fixture
def services(tmp_path, keys):
    started: dict[str, Service] = {}
    port = ["--metrics-port", str(free_ports(1))]
    try:
        started["engine"] = Service(tmp_path, "engine", keys, "--threads", "1", "--kv-cache-tokens", "8192", *port)
        started["metrics"] = port[1]
        started["detok"] = Service(tmp_path, "detok", keys)
        peers = ["--engines", started["engine"].ready["address"], "--detokenizers", started["detok"].ready["address"]]
        started["router"] = Service(tmp_path, "router", keys, "--port", "0", *peers)
        yield started
    finally:
        for role in MODULES.keys() & started.keys():
            started[role].process.kill()
            started[role].process.wait()


def generates(client: Client, text: str) -> str | None:
    try:
        return client.generate(text, max_tokens=16, temperature=0).text
    except SluiceError:
        return None


def test_strangers_are_refused_and_keys_of_every_role_can_be_rotated(services, keys, tmp_path):
    engine, detok, router = (services[role] for role in ("engine", "detok", "router"))
    assert engine.ready["address"].startswith("tcp://")
    with Client(router.ready["address"], timeout=LIMIT) as client:
        assert wait_until(lambda: generates(client, "def f(x):"))
        first = generates(client, "def f(x):")

        # A stranger with an unknown key, and one without a key.
        generate(tmp_path / "foreign", "router")
        pair = [(tmp_path / "foreign" / kind / "router.key").read_bytes().strip() for kind in KINDS]
        foreign = (*pair, (keys / "public" / "engine.key").read_bytes().strip())
        for stranger in (foreign, None):
            assert is_refused(engine.ready["address"], stranger, services["metrics"])
        assert generates(client, "def f(x):") == first

        # For each role: publish a new public key, switch to the new secret key, then retire the former public key.
        for role in ROLES:
            generate(keys, role)
            for service in (engine, detok, router):
                service.copy_keys(keys, f"public/{role}.key")
            services[role].copy_keys(keys, f"secret/{role}.key")
            # Nothing shows when all services have loaded the new keys, which they look for every second.
            time.sleep(1.5)
            assert wait_until(lambda: generates(client, "def f(x):") == first), role
            retire(keys, role)
            for service in (engine, detok, router):
                service.copy_keys(keys, f"public/{role}.key")
            assert wait_until(lambda: generates(client, "def f(x):") == first), role
    assert all(services[role].process.poll() is None for role in ROLES)


@pytest.mark.long
def test_a_retired_key_is_refused_and_no_stream_is_affected(services, keys):
    """With `sluice keygen --rotate` and `--retire`, as in docs/operations.md, while streams run."""
    former = [(keys / kind / "router.key").read_bytes().strip() for kind in KINDS]
    engine = (keys / "public" / "engine.key").read_bytes().strip()
    with Client(services["router"].ready["address"], timeout=2 * LIMIT) as client:
        assert wait_until(lambda: generates(client, "def f(x):"))
        text, over = client.generate("def f(x):", **OPTIONS).text, threading.Event()

        def stream() -> set[str]:
            texts = set()
            while not over.is_set():
                texts.add("".join(chunk.text for chunk in client.stream("def f(x):", **OPTIONS)))
            return texts

        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(stream)
            try:
                change_key(services, keys, "--rotate", "public/router.key", "secret/router.key")
                change_key(services, keys, "--retire", "public/router.key")
                assert is_refused(services["engine"].ready["address"], (*former, engine), services["metrics"])
            finally:
                over.set()
            assert streams.result() == {text}


def change_key(services: dict[str, Service], keys: Path, option: str, *files: str) -> None:
    """Change the router's key. Each service receives the `files` that concern it."""
    subprocess.run([sys.executable, "-m", "sluice", "keygen", str(keys), option, "router"], check=True)
    for file in files:
        for role in ROLES if file.startswith("public") else ("router",):
            services[role].copy_keys(keys, file)


OPTIONS = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
KINDS = ("public", "secret")


def is_refused(address: str, keys: tuple[bytes, bytes, bytes] | None, port: str) -> bool:
    """Whether a connection with these keys is refused, and counted as such by the engine's metrics at `port`."""
    before = refused_count(port)

    def is_counted() -> bool:
        return refused_count(port) > before

    def connect() -> bool:
        # A new connection each time, because a refused one may not be retried by ZeroMQ.
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            if keys is not None:
                socket.set(zmq.CURVE_PUBLICKEY, keys[0])
                socket.set(zmq.CURVE_SECRETKEY, keys[1])
                socket.set(zmq.CURVE_SERVERKEY, keys[2])
            socket.set(zmq.LINGER, 0)
            socket.connect(address)
            return wait_until(is_counted, 0.5)

    return wait_until(connect)


def refused_count(port: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        return float(re.search(r"^sluice_engine_peers_refused_total (\S+)", answer.read().decode(), re.M)[1])
