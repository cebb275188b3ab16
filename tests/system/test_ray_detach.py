"""A ring whose launcher is a job on a local Ray cluster: it keeps running after the command that started it has ended.

    pip install 'ray[default]'
    SLUICE_TEST_RAY=1 python -m pytest tests/system/test_ray_detach.py

Jobs need the cluster's dashboard, which is in `ray[default]`.
"""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from sluice.settings.services import SERVICES
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until
from tests.system.ray_streams import MARKS, OBJECT_STORE_BYTES, streams_over

pytest.importorskip("aiohttp_cors", reason="the cluster's dashboard is not installed: pip install 'ray[default]'")

pytestmark = MARKS

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    # Newer versions of Ray require a token by default.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
OPTIONS = ["--host", "0.0.0.0", "--port", "0", "--insecure", "--device", "cpu", "--set", "engine.threads=1"]


@pytest.fixture
def cluster(tmp_path) -> Iterator[str]:
    """The address of the cluster's job server."""
    dashboard = free_ports(2)
    options = ["--head", "--block", "--num-cpus=4", "--include-dashboard=true", f"--port={dashboard + 1}"]
    options += [f"--dashboard-port={dashboard}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    # Paths of Unix sockets are limited to 107 bytes.
    options += [f"--temp-dir=/tmp/ray-{secrets.token_hex(3)}", "--disable-usage-stats"]
    log = tmp_path / "ray.log"
    with log.open("wb") as output:
        ray = subprocess.Popen(
            [BIN / "ray", "start", *options], stdout=output, stderr=output, env=ENVIRONMENT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        ray.send_signal(signal.SIGTERM)
        try:
            ray.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(ray.pid, signal.SIGKILL)


def serve_detached(cluster: str, log: Path) -> dict[str, dict]:
    """Run `sluice serve --detach`. Returns its log lines by event."""
    command = [sys.executable, "-m", "sluice", "serve", "--detach", "--on", f"ray={cluster}", *OPTIONS]
    with log.open("w") as output:
        done = subprocess.run(command, stderr=output, env=ENVIRONMENT, timeout=400)
    text = log.read_text()
    assert done.returncode == 0, text
    return {
        line["event"]: line for line in map(json.loads, filter(lambda line: line.startswith("{"), text.splitlines()))
    }


def services() -> set[str]:
    """Process ids of all services on this machine."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_text().replace("\0", " ")
            if any(f"-m {settings.module}" in command for settings in SERVICES.values()):
                pids.add(process.name)
    return pids


def test_the_ring_serves_until_its_job_is_stopped(cluster, tmp_path) -> None:
    before = services()

    def up() -> bool:
        """Whether jobs can be submitted. The agents that this needs start after the server."""
        submit = [BIN / "ray", "job", "submit", "--no-wait", "--address", cluster, "--", "true"]
        return subprocess.run(submit, capture_output=True, env=ENVIRONMENT).returncode == 0

    if not wait_until(up, 120):
        pytest.skip("the cluster's job server did not come up")
    lines = serve_detached(cluster, tmp_path / "serve.log")
    assert lines["submitted"]["job"] == lines["ready"]["job"]
    assert services() - before
    stop = [str(BIN / "ray"), "job", "stop", "--address", cluster, lines["ready"]["job"]]
    stopping = partial(subprocess.run, stop, check=True, env=ENVIRONMENT, timeout=120)
    ended = asyncio.run(streams_over(stopping, lines["ready"]["addresses"]))
    # The ring drains, so running streams are completed.
    assert all(len(tokens) == 200 for stream in ended for _, tokens in stream.values())
    assert wait_until(lambda: not services() - before, 60)
