"""The whole ring over tcp with keys, each service with what it needs of them and no more, while keys change."""

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
from sluice.ring.keys import ROLES, Role, generate, retire
from tests.fakes.ports import free_ports
from tests.fakes.processes import LIMIT, wait_until

pytestmark = pytest.mark.timeout(300)

MODULES = {"router": "router", "engine": "engine_worker", "detok": "detok_service"}


class Service:
    """One process with a key folder of its own. `ready` is its log line of that name."""

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
        """Its log lines of this name."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]

    def take(self, keys: Path, *files: str) -> None:
        """Copy key files in one piece, as an operator's tool does."""
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
    found: dict[str, Service] = {}
    port = ["--metrics-port", str(free_ports(1))]
    try:
        found["engine"] = Service(tmp_path, "engine", keys, "--threads", "1", "--kv-cache-tokens", "8192", *port)
        found["metrics"] = port[1]
        found["detok"] = Service(tmp_path, "detok", keys)
        peers = ["--engines", found["engine"].ready["address"], "--detokenizers", found["detok"].ready["address"]]
        found["router"] = Service(tmp_path, "router", keys, "--port", "0", *peers)
        yield found
    finally:
        for role in MODULES.keys() & found.keys():
            found[role].process.kill()
            found[role].process.wait()


def generates(client: Client, text: str) -> str | None:
    try:
        return client.generate(text, max_tokens=16, temperature=0).text
    except SluiceError:
        return None


def test_a_ring_over_tcp_with_keys(services, keys, tmp_path):
    engine, detok, router = (services[role] for role in ("engine", "detok", "router"))
    assert engine.ready["address"].startswith("tcp://")
    with Client(router.ready["address"], timeout=LIMIT) as client:
        assert wait_until(lambda: generates(client, "def f(x):"))
        first = generates(client, "def f(x):")

        # Somebody with another key, and somebody with none.
        generate(tmp_path / "foreign", "router")
        own = [(tmp_path / "foreign" / kind / "router.key").read_bytes().strip() for kind in KINDS]
        foreign = (*own, (keys / "public" / "engine.key").read_bytes().strip())
        for stranger in (foreign, None):
            assert is_refused(engine.ready["address"], stranger, services["metrics"])
        assert generates(client, "def f(x):") == first

        # New keys for one role after the other: public ones first, then the secret, then without the former.
        for role in ROLES:
            generate(keys, role)
            for service in (engine, detok, router):
                service.take(keys, f"public/{role}.key")
            services[role].take(keys, f"secret/{role}.key")
            time.sleep(1.5)
            assert wait_until(lambda: generates(client, "def f(x):") == first), role
            retire(keys, role)
            for service in (engine, detok, router):
                service.take(keys, f"public/{role}.key")
            assert wait_until(lambda: generates(client, "def f(x):") == first), role
    assert all(services[role].process.poll() is None for role in ROLES)


def test_a_retired_key_admits_nobody_and_streams_go_on(services, keys):
    """`sluice keygen --rotate` and `--retire`, as in docs/operations.md, under streams without pause."""
    former = [(keys / kind / "router.key").read_bytes().strip() for kind in KINDS]
    engine = (keys / "public" / "engine.key").read_bytes().strip()
    with Client(services["router"].ready["address"], timeout=2 * LIMIT) as client:
        assert wait_until(lambda: generates(client, "def f(x):"))
        text, over = client.generate("def f(x):", **OPTIONS).text, threading.Event()

        def stream() -> set[str]:
            found = set()
            while not over.is_set():
                found.add("".join(chunk.text for chunk in client.stream("def f(x):", **OPTIONS)))
            return found

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
    """Of the router. Each service gets what changed of its files."""
    subprocess.run([sys.executable, "-m", "sluice", "keygen", str(keys), option, "router"], check=True)
    for file in files:
        for role in ROLES if file.startswith("public") else ("router",):
            services[role].take(keys, file)


OPTIONS = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
KINDS = ("public", "secret")


def is_refused(address: str, keys: tuple[bytes, bytes, bytes] | None, port: str) -> bool:
    """Whether somebody with these keys is, and is counted. One who was refused may not try again by itself."""
    before = refused(port)

    def knock() -> bool:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            if keys is not None:
                socket.set(zmq.CURVE_PUBLICKEY, keys[0])
                socket.set(zmq.CURVE_SECRETKEY, keys[1])
                socket.set(zmq.CURVE_SERVERKEY, keys[2])
            socket.set(zmq.LINGER, 0)
            socket.connect(address)
            time.sleep(0.5)
        return refused(port) > before

    return wait_until(knock)


def refused(port: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        return float(re.search(r"^sluice_engine_peers_refused_total (\S+)", answer.read().decode(), re.M)[1])
