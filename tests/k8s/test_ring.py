"""The services run with the commands, environment variables, ConfigMaps and mounted keys of the chart's pods.

Pods have addresses of the loopback network and separate temporary folders. The router's settings name these addresses
instead of the cluster's host names.
"""

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError

import pytest

from sluice import tiny_model
from sluice.client import Client
from sluice.lanes.keys import ROLES, generate
from tests.fakes.processes import LIMIT, wait_until
from tests.k8s.chart import Pod, kinds, objects_from, pods

NETWORK = f"127.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
ADDRESSES = {"router": f"{NETWORK}.2", "engine": f"{NETWORK}.3", "detok": f"{NETWORK}.4"}
RING_PORT, GRPC_PORT, METRICS_PORT = 17000, 15051, 19100
VALUES = {
    "ring": {"port": RING_PORT},
    "metrics": {"port": METRICS_PORT},
    "model": {"source": "hostPath", "hostPath": "/unused", "path": ""},
    "router": {"port": GRPC_PORT, "drainSeconds": 5},
    "engine": {"gpu": {"count": 0}, "settings": {"threads": 1}},
}

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs a loopback network of many addresses"),
]


def replaced(text: str, here: Mapping[str, str]) -> str:
    for name, value in here.items():
        text = text.replace(name, value)
    return text


class Running:
    """A service as in its pod, with files below a separate folder."""

    def __init__(self, pod: Pod, config: dict[str, str], keys: Path, folder: Path, memory: Path) -> None:
        self.address = ADDRESSES[pod.component]
        self._log = folder / "log"
        (folder / "keys" / "secret").mkdir(parents=True)
        shutil.copy(keys / "secret" / f"{pod.component}.key", folder / "keys" / "secret")
        shutil.copytree(keys / "public", folder / "keys" / "public")
        here = {
            "/etc/sluice/keys": f"{folder}/keys",
            "/models": str(tiny_model.path()),
            "0.0.0.0": self.address,
            "/dev/shm/sluice": str(memory),
        }
        for file, text in config.items():
            (folder / file).write_text(replaced(text, here))
        command = [sys.executable if word == "python" else word for word in pod.container["command"]]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=self._environment(pod, folder), stderr=log)

    def _environment(self, pod: Pod, folder: Path) -> dict[str, str]:
        here = {"$(POD_NAME)": pod.component, "$(POD_IP)": self.address, "/etc/sluice/config": str(folder)}
        variables = {each["name"]: replaced(each["value"], here) for each in pod.container["env"] if "value" in each}
        if pod.component == "router":
            for setting, peer in (("ENGINES", "engine"), ("DETOKENIZERS", "detok")):
                variables[f"SLUICE_ROUTER_{setting}"] = f"tcp://{ADDRESSES[peer]}:{RING_PORT}"
        return {**os.environ, **variables}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def probe(self, path: str) -> int:
        try:
            return int(urllib.request.urlopen(f"http://{self.address}:{METRICS_PORT}{path}", timeout=5).status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(LIMIT)

    def remove(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[dict[str, Running]]:
    objects = objects_from(VALUES)
    (config,) = kinds(objects, "ConfigMap")
    for role in ROLES:
        generate(tmp_path / "keys", role)
    running: dict[str, Running] = {}
    with TemporaryDirectory(dir="/dev/shm") as memory:
        try:
            for pod in pods(objects):
                folder = tmp_path / pod.component
                running[pod.component] = Running(pod, config["data"], tmp_path / "keys", folder, Path(memory))
            yield running
        finally:
            for each in running.values():
                each.remove()


def test_a_stream_and_the_shutdown(ring: dict[str, Running]) -> None:
    for each in ring.values():
        assert wait_until(lambda each=each: each.probe("/readyz") == 200), each.log  # type: ignore[misc]
        assert wait_until(lambda each=each: each.probe("/livez") == 200), each.log  # type: ignore[misc]
    with Client(f"{ADDRESSES['router']}:{GRPC_PORT}") as client:
        assert client.generate("def f(", max_tokens=8, seed=1).text
    assert {name: each.stop() for name, each in ring.items()} == dict.fromkeys(ring, 0)
