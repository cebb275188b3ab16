"""A release: sdist and wheel, checked as for an upload, installed without a checkout, and used.

With SLUICE_TEST_PYTHONS=1 every Python that is found serves too, which downloads some GB of torch for each.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, build, copy_checkout

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

OTHER_PYTHONS = ("3.12", "3.13")
ADDRESS = re.compile(r'"addresses": \["([\d.:]+)"\]')
CLIENT = """
import importlib.util, sys
from sluice import Client
assert importlib.util.find_spec("torch") is None
with Client(sys.argv[1]) as client:
    with client.stream("def f(", max_tokens=4, temperature=0) as stream:
        print(len("".join(chunk.text for chunk in stream)) > 0, stream.usage.completion_tokens)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    return folder


@pytest.fixture(scope="module")
def release(checkout, tmp_path_factory) -> tuple[Path, Path]:
    """Wheel and sdist."""
    sdist, wheel = sorted(build(checkout, tmp_path_factory.mktemp("release")), key=lambda path: path.suffix)
    return wheel, sdist


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def find_python(version: str) -> str | None:
    candidates = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    return next((str(each) for each in candidates if each), None)


def outside() -> dict[str, str]:
    """The environment without PYTHONPATH, which may contain the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def make_environment(folder: Path, python: str, *packages: str) -> Path:
    """Creates a virtual environment and returns its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    for package in packages:
        subprocess.run([*pip, package], check=True, capture_output=True, env=outside())
    return folder / "bin" / "python"


def test_twine_accepts_both(release):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, release)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def test_the_sdist_builds_the_wheel_of_the_checkout(release, checkout, tmp_path):
    (direct,) = build(checkout, tmp_path, "--wheel")
    assert direct.name == release[0].name
    assert contents(direct) == contents(release[0])


@pytest.mark.parametrize("version", [None, *OTHER_PYTHONS])
def test_the_wheel_alone_serves(release, version, tmp_path):
    """A stream for clients without extras, with this version of Python and others."""
    if version is not None and "SLUICE_TEST_PYTHONS" not in os.environ:
        pytest.skip("downloads torch: set SLUICE_TEST_PYTHONS=1")
    base = sys.executable if version is None else find_python(version)
    if base is None:
        pytest.skip(f"no Python {version} here")
    wheel = release[0]
    python = make_environment(tmp_path / "venv", base, "torch", f"{wheel}[router,detok,engine]")
    client_python = make_environment(tmp_path / "client", base, str(wheel))
    command = [str(python.with_name("sluice")), "serve", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=outside(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        ready = next(line for line in server.stderr if '"event": "ready"' in line and "addresses" in line)
        address = ADDRESS.search(ready)[1]
        client_command = [str(client_python), "-c", CLIENT, address]
        answer = subprocess.run(
            client_command, cwd=tmp_path, env=outside(), capture_output=True, text=True, check=False
        )
        assert answer.stdout.strip() == "True 4", answer.stderr
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


def test_without_extras_the_wheel_is_a_client(release, tmp_path):
    python = make_environment(tmp_path / "venv", sys.executable, str(release[0]))

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [str(python), "-m", "sluice", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=60)

    done = run("generate", "x", "--address", "127.0.0.1:1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "no Sluice server answers" in done.stderr
    served = run("serve")
    assert served.returncode == 1
    assert "this installation cannot serve" in served.stderr
    assert "Traceback" not in served.stderr


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_other_versions_of_python_import_and_start_the_services(release, version, tmp_path):
    """Client, command line, router and detokenizer, without torch, which has no small build for all versions."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    environment_python = make_environment(tmp_path / "venv", python, f"{release[0]}[router,detok]")
    imports = "sluice, sluice.client, sluice.executor, sluice.llm, router.app, detok_service.service"
    calls = [["-m", "sluice", "--version"], ["-m", "sluice", "bench", "--help"], ["-c", f"import {imports}"]]
    calls += [["-m", service, "--help"] for service in ("router", "detok_service")]
    for call in calls:
        done = subprocess.run(
            [str(environment_python), *call], cwd=tmp_path, env=outside(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
