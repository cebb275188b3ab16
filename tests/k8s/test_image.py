"""An image built from the Containerfile, run as a cluster runs it: read-only, uid 10001, process 1, no capabilities.

    SLUICE_TEST_IMAGE=1 python -m pytest tests/k8s/test_image.py

It takes some minutes, so it is not part of `make test`. Needs root, buildah, podman and mmdebstrap, and an internet
connection for Debian's and Python's packages.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import tiny_model
from sluice.client import Client
from sluice.lanes.keys import ROLES, generate
from tests.fakes.processes import wait_until

ROOT = Path(__file__).parents[2]
TOOLS = ("buildah", "podman", "mmdebstrap")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
BASE, IMAGE = "localhost/sluice-test-base", "localhost/sluice-test"
HOST_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
"""Files of this machine that configure access to the package index, if they exist."""
GRACE_SECONDS = 10.0
RUNTIME = ["--runtime", "runc"] if shutil.which("runc") else []
"""crun does not run on machines on which both versions of control groups are mounted."""
RESTRICTIONS = ("--read-only", "--tmpfs", "/tmp", "--cap-drop=all", "--security-opt", "no-new-privileges")
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1000:1000")
"""podman's default limits exceed those of a container within a container."""
RUN = ("podman", *RUNTIME, "run", "--network", "host", *RESTRICTIONS, *LIMITS)

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("SLUICE_TEST_IMAGE" not in os.environ, reason="takes minutes: set SLUICE_TEST_IMAGE=1"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root"),
]


def run(*command: str, seconds: float = 600.0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("base") / "base.tar"
    packages = "python3,python3-venv,ca-certificates"
    run("mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(base))
    run("podman", "import", "--quiet", str(base), BASE)
    volumes = [f"--volume={file}:{file}:ro" for file in HOST_FILES if Path(file).exists()]
    build = ["buildah", "bud", "--isolation", "chroot", "--network", "host", *volumes]
    run(*build, "--build-arg", f"BASE={BASE}", "--file", "k8s/Containerfile", "--tag", IMAGE, ".")
    return IMAGE


class Container:
    """A service from the image, as process 1 of a separate process namespace, on the network of this machine."""

    def __init__(self, image: str, *command: str, mounts: dict[Path, str] | None = None) -> None:
        volumes = [f"--volume={source}:{target}:ro" for source, target in (mounts or {}).items()]
        self.id = run(*RUN, "--detach", *volumes, image, *command)

    def execute(self, *command: str) -> str:
        return run("podman", "exec", self.id, *command)

    @property
    def log(self) -> str:
        done = subprocess.run(["podman", "logs", self.id], capture_output=True, text=True)
        return done.stdout + done.stderr

    def event(self, name: str) -> dict | None:
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith("{"))
        return next((line for line in lines if line["event"] == name), None)

    def ready(self) -> dict:
        assert wait_until(lambda: self.event("ready") is not None), self.log
        return self.event("ready") or {}

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit status. Raises TimeoutExpired if the service runs longer than the grace
        period."""
        run("podman", "kill", "--signal", "TERM", self.id)
        return int(run("podman", "wait", self.id, seconds=GRACE_SECONDS))

    def remove(self) -> None:
        subprocess.run(["podman", "rm", "--force", "--time", "0", self.id], capture_output=True)


@pytest.fixture(scope="module")
def model(image: str) -> str:
    """Folder of the bundled model in the image."""
    return run(*RUN, "--rm", image, "python", "-c", "from sluice import tiny_model; print(tiny_model.path())")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Folders like mounted Secrets: the secret key of each role, and all public keys."""
    for role in ROLES:
        generate(tmp_path / "keys", role)
    for role in ROLES:
        secret = tmp_path / role / "secret"
        secret.mkdir(parents=True)
        shutil.copy(tmp_path / "keys" / "secret" / f"{role}.key", secret)
        shutil.copytree(tmp_path / "keys" / "public", tmp_path / role / "public")
        for each in (tmp_path / role).rglob("*"):
            os.chown(each, 0, 10001)
            each.chmod(0o750 if each.is_dir() else 0o440)
    return tmp_path


@pytest.fixture
def engine(keys: Path, tmp_path: Path) -> Iterator[str]:
    """Address of an engine outside of the containers, because the image has no torch."""
    log = tmp_path / "engine.log"
    command = [sys.executable, "-m", "engine_worker", "--model", str(tiny_model.path()), "--keys", str(keys / "engine")]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--listen", "tcp://127.0.0.1:*", "--threads", "1"], stderr=file)
    try:
        assert wait_until(lambda: '"event": "ready"' in log.read_text()), log.read_text()
        yield re.findall(r"tcp://127\.0\.0\.1:\d+", log.read_text())[0]
    finally:
        process.kill()
        process.wait()


def test_a_ring_with_router_and_detokenizer_from_the_image(image: str, model: str, keys: Path, engine: str) -> None:
    common = ("--model", model, "--keys", "/etc/sluice/keys")
    detok = Container(
        image,
        "python",
        "-m",
        "detok_service",
        *common,
        "--listen",
        "tcp://127.0.0.1:*",
        mounts={keys / "detok": "/etc/sluice/keys"},
    )
    containers = [detok]
    try:
        peers = ("--engines", engine, "--detokenizers", detok.ready()["address"])
        router = Container(
            image,
            "python",
            "-m",
            "router",
            *common,
            *peers,
            "--listen",
            "tcp://127.0.0.1:*",
            "--port",
            "0",
            mounts={keys / "router": "/etc/sluice/keys"},
        )
        containers.append(router)
        address = router.ready()["address"]
        assert detok.execute("id", "-u") == "10001"
        status = detok.execute("cat", "/proc/1/status")
        assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE)
        assert "detok_service" in detok.execute("cat", "/proc/1/cmdline")
        router.execute("python", "-c", "import router.otlp")
        with pytest.raises(AssertionError, match="Read-only"):
            detok.execute("touch", "/opt/sluice/file")
        with Client(address) as client:
            assert wait_until(client.health)
            first = client.generate("def f(", max_tokens=16, seed=1).text
            assert first
            assert client.generate("def f(", max_tokens=16, seed=1).text == first
        assert [router.stop(), detok.stop()] == [0, 0]
    finally:
        for each in containers:
            each.remove()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("module", ["router", "detok_service"])
def test_sigterm_at_any_time_of_the_start(image: str, model: str, keys: Path, module: str, seconds: float) -> None:
    """Without a handler, the kernel does not deliver SIGTERM to process 1."""
    role = "router" if module == "router" else "detok"
    flags = ("--engines", "tcp://127.0.0.1:1", "--detokenizers", "tcp://127.0.0.1:2", "--port", "0")
    container = Container(
        image,
        "python",
        "-m",
        module,
        "--model",
        model,
        "--keys",
        "/etc/sluice/keys",
        *(flags if module == "router" else ()),
        mounts={keys / role: "/etc/sluice/keys"},
    )
    try:
        time.sleep(seconds)
        assert container.stop() == 0
    finally:
        container.remove()
