"""Wheels and sdists of a copy of the checkout, as a release builds them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("sluice", "router", "engine_worker", "detok_service", "gateway")
FILES = ("pyproject.toml", "LICENSE", "NOTICE", "docs/pypi.md")
# Timestamp of the archives' members, so that the same tree gives the same bytes.
EPOCH = "1767225600"


def copy_checkout(folder: Path) -> None:
    """A copy of the files that a release is built from, without leftovers of other builds."""
    for name in (*TOP, "protos"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)


def build(folder: Path, out: Path, *flags: str) -> list[Path]:
    """`python -m build`: an sdist and the wheel of that sdist, unless flags say otherwise."""
    command = [sys.executable, "-m", "build", "--outdir", str(out), *flags, str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return sorted(out.iterdir())
