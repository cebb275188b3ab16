"""What Triton needs on this machine to compile: it builds a small C extension before its first kernel."""

import os
import shutil
import sysconfig
from pathlib import Path

COMPILERS = ("gcc", "clang")
REMEDY = "install gcc and python3-dev, or Sluice's kernels run only from a filled Triton cache"


def missing() -> str | None:
    """What is not here, with the remedy, in one line; None where Triton can compile."""
    absent = []
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        absent.append(f"a C compiler ({', '.join(COMPILERS)} or the variable CC)")
    if not (_headers() / "Python.h").is_file():
        absent.append(f"Python's headers ({_headers()}/Python.h)")
    return f"Triton misses {' and '.join(absent)}: {REMEDY}" if absent else None


def _headers() -> Path:
    """Where Triton looks: Debian's own scheme for `pip install` has no headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
