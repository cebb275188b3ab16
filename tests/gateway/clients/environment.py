"""A virtual environment per client program, made once per machine and shared by later runs.

torch comes first and at the pin of constraints.txt, because a program that asks for any torch would install the build
for CUDA, of gigabytes.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.real_model import NO_SUCH_PACKAGE

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
SHARED = ("torch", "transformers", "tokenizers")
"""Packages at the version that the engine is tested with, since results are compared with theirs."""

RUN_SECONDS = 900.0
"""Limit of one program, generous enough for a busy machine."""

LINES_OF_A_FAILURE = 60


def environment(name: str, *requirements: str) -> Path:
    """The folder of programs of the environment, made first if this machine has none. Processes that ask at the same
    time wait for the one that makes it. Skips the test if the package registry does not have a package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"
    torch, *others = (f"{package}=={pinned(package)}" for package in SHARED)
    wanted = [torch, *others, *requirements, sys.version]
    folder = cache / f"{name}-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:12]}"
    done = folder / "installed"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_file():
            run([sys.executable, "-m", "venv", "--clear", folder])
            install(folder, torch)
            install(folder, torch, *others, *requirements)
            done.touch()
    return folder / "bin"


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    lines = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines())
    return next(version for name, _, version in lines if name == package)


def install(folder: Path, *requirements: str) -> None:
    try:
        run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements])
    except AssertionError as error:
        if any(sign in str(error) for sign in NO_SUCH_PACKAGE):
            pytest.skip(f"the package registry lacks a package of {', '.join(requirements)}")
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
