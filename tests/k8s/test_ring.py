"""The services run with the commands, environment variables, ConfigMaps and mounted keys of the chart's pods.

Pods have addresses of the loopback network and separate temporary folders. The router's settings name these addresses
instead of the cluster's host names. A keeper has the network, memory and keys of its pod.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from sluice import tiny_model
from sluice.client import Client
from sluice.lanes.keys import ROLES, generate
from tests.fakes.processes import LIMIT, wait_until
from tests.k8s.chart import RELEASE, Object, kinds, objects_from, pods

NETWORK = f"127.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
RING_PORT, GRPC_PORT, METRICS_PORT = 17000, 15051, 19100
KEEPER_PORT, KEEPER_METRICS_PORT = 17001, 19101
VALUES: dict[str, Any] = {
    "ring": {"port": RING_PORT},
    "metrics": {"port": METRICS_PORT},
    "model": {"source": "hostPath", "hostPath": "/unused", "path": ""},
    "router": {"port": GRPC_PORT, "drainSeconds": 5},
    "engine": {"gpu": {"count": 0}, "settings": {"threads": 1}},
}
PHASES: dict[str, Any] = {
    "engine": {
        **VALUES["engine"],
        "keeper": {"enabled": True, "port": KEEPER_PORT, "metricsPort": KEEPER_METRICS_PORT},
    },
    "engines": [{"name": "prefill", "phase": "prefill"}, {"name": "decode", "phase": "decode"}],
}
PROMPT = "def fibonacci(n):\n    return n\n\n" * 40
"""Long enough to be handed over."""

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
    """A container as in its pod, with files below a separate folder."""

    def __init__(self, container: Object, address: str, config: Mapping[str, str], folder: Path, memory: Path) -> None:
        """`config`: the files of the ConfigMap. `folder`: the pod's, which has its keys. `memory`: its /dev/shm."""
        self.address = address
        self._ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        self._log = folder / f"{container['name']}.log"
        here = {
            "$(POD_NAME)": folder.name,
            "$(POD_IP)": address,
            "/etc/sluice/config": str(folder),
            "/etc/sluice/keys": f"{folder}/keys",
            "/models": str(tiny_model.path()),
            "0.0.0.0": address,
            "/dev/shm/sluice": str(memory),
        }
        for file, text in config.items():
            (folder / file).write_text(replaced(text, here))
        environment = {each["name"]: replaced(each["value"], here) for each in container["env"] if "value" in each}
        command = [sys.executable if word == "python" else word for word in container["command"]]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str, port: str = "metrics") -> tuple[int, str]:
        """Status, 0 without an answer, and content."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{self._ports[port]}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(LIMIT)

    def remove(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def started(values: Mapping[str, Any], tmp_path: Path) -> Iterator[dict[str, Running]]:
    """All containers of a release, by pod and, for keepers, container."""
    objects = objects_from({**VALUES, **values})
    (config,) = kinds(objects, "ConfigMap")
    for role in ROLES:
        generate(tmp_path / "keys", role)
    own = {pod.owner["metadata"]["name"].removeprefix(f"{RELEASE}-"): pod for pod in pods(objects)}
    addresses = {name: f"{NETWORK}.{host}" for host, name in enumerate(own, start=2)}
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        for name, pod in own.items():
            memory = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
            folder = tmp_path / name
            mount_keys(tmp_path / "keys", folder, pod.component)
            files = {file: with_peers(text, addresses) for file, text in config["data"].items()}
            for container in filter(None, (pod.keeper, pod.container)):
                key = f"{name}-keeper" if container is pod.keeper else name
                running[key] = Running(container, addresses[name], files, folder, memory)
                stack.callback(running[key].remove)
        yield running


def mount_keys(keys: Path, folder: Path, role: str) -> None:
    """As the volumes with the Secrets."""
    (folder / "keys" / "secret").mkdir(parents=True)
    shutil.copy(keys / "secret" / f"{role}.key", folder / "keys" / "secret")
    shutil.copytree(keys / "public", folder / "keys" / "public")


def with_peers(text: str, addresses: Mapping[str, str]) -> str:
    """A settings file with addresses in place of the cluster's names."""
    settings = yaml.safe_load(text)
    for setting, component in (("engines", "engine"), ("detokenizers", "detok")):
        if setting in settings:
            of_component = [address for name, address in addresses.items() if name.startswith(component)]
            settings[setting] = [f"tcp://{address}:{RING_PORT}" for address in of_component]
    return yaml.safe_dump(settings)


def check_ready(ring: Mapping[str, Running]) -> None:
    for name, each in ring.items():
        port = "keeper-metrics" if name.endswith("keeper") else "metrics"
        for path in ("/readyz", "/livez"):
            assert wait_until(lambda each=each, path=path, port=port: each.get(path, port)[0] == 200), each.log  # type: ignore[misc]


def test_a_stream_and_the_shutdown(tmp_path: Path) -> None:
    with started({}, tmp_path) as ring:
        check_ready(ring)
        with Client(f"{ring['router'].address}:{GRPC_PORT}") as client:
            assert client.generate("def f(", max_tokens=8, seed=1).text
        assert {name: each.stop() for name, each in ring.items()} == dict.fromkeys(ring, 0)


@pytest.mark.long
def test_a_decode_engine_copies_blocks_from_the_keeper_of_another_pod(tmp_path: Path) -> None:
    with started(PHASES, tmp_path) as ring:
        check_ready(ring)
        # A router is ready with one engine.
        for engine in ("engine-prefill", "engine-decode"):
            assert wait_until(lambda engine=engine: f'"peer": "{engine}"' in ring["router"].log)  # type: ignore[misc]
        with Client(f"{ring['router'].address}:{GRPC_PORT}") as client:
            assert client.generate(PROMPT, max_tokens=8, seed=1).text
        assert 'outcome="continued"} 1.0' in ring["router"].get("/metrics")[1]
        _, metrics = ring["engine-prefill-keeper"].get("/metrics", "keeper-metrics")
        (blocks,) = re.findall(r'keeper_blocks_read_total{tier="memory"} ([0-9.]+)', metrics)
        assert float(blocks) > 0
        assert {name: each.stop() for name, each in ring.items()} == dict.fromkeys(ring, 0)
