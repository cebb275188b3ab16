"""The committed code in sluice/v1 matches the .proto files, and the .proto files are lint clean."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").glob("sluice/v1/*.proto"))


def plugin(name: str) -> str:
    beside_python = Path(sys.executable).with_name(name)
    return str(beside_python) if beside_python.exists() else str(shutil.which(name))


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    out = tmp_path_factory.mktemp("generated")
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [f"--plugin={name}={plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    subprocess.run([*protoc, *flags, *plugins, *map(str, PROTOS)], check=True, capture_output=True)
    return out / "sluice" / "v1"


def test_every_generated_file_is_committed_and_fresh(generated):
    committed = ROOT / "sluice" / "v1"
    fresh = {file.name: file.read_text() for file in generated.iterdir()}
    assert len(fresh) == 4 * len(PROTOS)
    stale = [name for name, text in fresh.items() if (committed / name).read_text() != text]
    assert not stale, f"run `make protos`: {stale}"
    left_over = {file.name for file in committed.glob("*_pb2*")} - fresh.keys()
    assert not left_over


def breaking(folder: Path) -> subprocess.CompletedProcess:
    command = [plugin("buf"), "breaking", str(folder), "--against", str(ROOT / "protos" / "released.binpb")]
    return subprocess.run(command, capture_output=True, text=True)


def test_clients_of_the_last_release_are_not_broken():
    found = breaking(ROOT / "protos")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_change_that_breaks_them_is_found(tmp_path):
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    file = tmp_path / "protos" / "sluice" / "v1" / "sampling.proto"
    text = file.read_text()
    assert "optional float temperature = 1;" in text
    file.write_text(text.replace("optional float temperature = 1;", "optional double temperature = 1;"))
    found = breaking(tmp_path / "protos")
    assert found.returncode != 0
    assert "temperature" in found.stdout


def test_protos_are_lint_clean():
    found = subprocess.run([plugin("buf"), "lint", str(ROOT / "protos")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
