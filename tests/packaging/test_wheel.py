"""The wheel that `pip install` builds from a checkout."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import sluice
from tests.packaging.distributions import ROOT, TOP, copy_checkout

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], str]:
    """The names of the files in the wheel, and what setuptools printed."""
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
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
    """Files of the packages in the checkout."""
    paths = (path for name in TOP for path in (ROOT / name).rglob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_list_of_packages_is_that_of_the_tree(project):
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    protos = {"sluice.protos", "sluice.protos.sluice", "sluice.protos.sluice.v1"}
    folders = {Path(file).parent.as_posix().replace("/", ".") for file in tracked("*.py")}
    assert set(listed) == folders | protos | {"sluice.tiny_model.checkpoint"}


def test_a_wheel_contains_every_module_and_data_file(built):
    files, _ = built
    checkpoint = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sluice/tiny_model/checkpoint").iterdir()}
    protos = {f"sluice/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "protos").rglob("*.proto")}
    expected = tracked("*.py") | tracked("*.pyi") | tracked("*.html") | checkpoint | protos
    expected |= {"sluice/py.typed", "sluice/protos/buf.yaml"}
    assert len(protos) == 3
    assert "sluice/tiny_model/checkpoint/model.safetensors" in checkpoint
    assert expected - files == set()
    info = {name for name in files if ".dist-info/" in name}
    assert files - info - expected == {"sluice/tiny_model/README.md"}


def test_a_wheel_contains_the_license(built, project):
    files, _ = built
    for name in ("LICENSE", "NOTICE"):
        assert any(file.endswith(f".dist-info/licenses/{name}") for file in files)
    assert project["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_setuptools_prints_no_warnings(built):
    _, printed = built
    assert re.findall(r"(?im)^.*(?:warning|deprecat|!!|absent).*$", printed) == []


def test_the_version_is_that_of_the_metadata_and_in_the_changelog(project):
    version = project["project"]["version"]
    assert sluice.__version__ == version
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_on_pypi_lead_to_files_of_the_repository(project):
    page = (ROOT / project["project"]["readme"]).read_text(encoding="utf-8")
    home = project["project"]["urls"]["Homepage"]
    links = [*re.findall(r"\]\(([^)]+)\)", page), *project["project"]["urls"].values()]
    for link in links:
        assert link.startswith(home)
        if match := re.fullmatch(r"/(blob|tree)/main/(.+)", link.removeprefix(home)):
            path = ROOT / match[2].partition("#")[0]
            assert path.is_dir() if match[1] == "tree" else path.is_file(), link
        else:
            assert link.removeprefix(home) in ("", "#readme", "/issues")


def test_classifiers_name_the_versions_of_python_that_are_required(project):
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["project"]["classifiers"]))
    assert project["project"]["requires-python"] == f">=3.{minors[0]}"
    assert (ROOT / "docs" / "pypi.md").read_text().count(f"Python 3.{minors[0]} to 3.{minors[-1]}") == 1
