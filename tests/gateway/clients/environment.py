"""An environment per client program, made once per machine and shared by later runs.

Where torch is needed, it comes first and at the pin of constraints.txt, because a program that asks for any torch would
install the build for CUDA, of gigabytes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness.real_model import NO_SUCH_PACKAGE

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
SHARED = ("torch", "transformers", "tokenizers")
"""Packages at the version that the engine is tested with, since results are compared with theirs."""

NO_SUCH_NPM_PACKAGE = ("npm error code E404", "npm error code ETARGET")
RUN_SECONDS = 900.0
"""Limit of one program, generous enough for a busy machine."""

LINES_OF_A_FAILURE = 60


def environment(name: str, *requirements: str) -> Path:
    """The folder of programs of an environment with SHARED, made first if this machine has none. Processes that ask at
    the same time wait for the one that makes it. Skips the test if the package registry does not have a package."""
    torch, *others = (f"{package}=={pinned(package)}" for package in SHARED)
    wanted = [torch, *others, *requirements]
    return made(name, lambda folder: make(folder, [torch], wanted), *wanted) / "bin"


def plain_environment(name: str, *requirements: str) -> Path:
    """As `environment`, with nothing but the requirements and what they need."""
    return made(name, lambda folder: make(folder, list(requirements)), *requirements) / "bin"


def npm_environment(name: str, *packages: str) -> Path:
    """As `plain_environment`, a folder with node_modules."""
    return made(name, lambda folder: install_npm(folder, *packages), *packages)


def made(name: str, make: Callable[[Path], None], *requirements: str) -> Path:
    """The folder of an environment, made first if this machine has none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"
    wanted = [*requirements, sys.version]
    folder = cache / f"{name}-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:12]}"
    done = folder / "installed"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            make(folder)
            done.touch()
    return folder


def make(folder: Path, *steps: list[str]) -> None:
    """A virtual environment, with each step's requirements installed after those of the one before."""
    run([sys.executable, "-m", "venv", "--clear", folder])
    for step in steps:
        install(folder, *step)


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    lines = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines())
    return next(version for name, _, version in lines if name == package)


def install(folder: Path, *requirements: str) -> None:
    run_installer([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], *requirements)


def install_npm(folder: Path, *packages: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", "--prefix", folder]
    run_installer(["npm", "install", *options, *packages], *packages)


def run_installer(command: list[str | Path], *packages: str) -> None:
    try:
        run(command)
    except AssertionError as error:
        if any(sign in str(error) for sign in (*NO_SUCH_PACKAGE, *NO_SUCH_NPM_PACKAGE)):
            pytest.skip(f"the package registry lacks a package of {', '.join(packages)}")
        raise


def run(command: list[str | Path], *, cwd: Path | None = None, **variables: str) -> str:
    """Run a program to its end and return what it wrote. It imports nothing of this repository and asks no hub."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)),
        env=inherited | offline | variables,
        cwd=cwd,
        timeout=RUN_SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    tail = "\n".join(done.stdout.splitlines()[-LINES_OF_A_FAILURE:])
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{tail}"
    return done.stdout
