"""What `pip install` makes of a checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("sluice", "router", "engine_worker", "detok_service")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], str]:
    """The names of the files in the wheel, and what setuptools printed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in (*TOP, "protos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder / "dist")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next((folder / "dist").glob("*.whl"))) as wheel:
        return set(wheel.namelist()), done.stdout + done.stderr


def tracked(pattern: str) -> set[str]:
    """Files of the packages, as they lie in the checkout."""
    found = (path for name in TOP for path in (ROOT / name).rglob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_list_of_packages_is_that_of_the_tree(project):
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    protos = {"sluice.protos", "sluice.protos.sluice", "sluice.protos.sluice.v1"}
    folders = {Path(file).parent.as_posix().replace("/", ".") for file in tracked("*.py")}
    assert set(listed) == folders | protos | {"sluice.tiny_model.checkpoint"}


def test_a_wheel_holds_every_module_and_every_file_that_they_read(built):
    files, _ = built
    checkpoint = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sluice/tiny_model/checkpoint").iterdir()}
    protos = {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "protos").rglob("*.proto")}
    wanted = tracked("*.py") | tracked("*.pyi") | tracked("*.html") | checkpoint | protos | {"sluice/py.typed"}
    assert len(protos) == 3
    assert "sluice/tiny_model/checkpoint/model.safetensors" in checkpoint
    assert wanted - files == set()
    info = {name for name in files if ".dist-info/" in name}
    assert files - info - wanted == {"sluice/tiny_model/README.md"}


def test_a_wheel_holds_the_license(built, project):
    files, _ = built
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    assert project["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_setuptools_has_nothing_to_complain_about(built):
    _, printed = built
    assert re.findall(r"(?im)^.*(?:warning|deprecat|!!|absent).*$", printed) == []
