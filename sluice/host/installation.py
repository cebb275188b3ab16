"""What is installed: this build's version, and whether a service's packages are present. A client-only installation
lacks them."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sluice.host.process import last_line

DISTRIBUTION = "sluice-serve"
"""Name on PyPI, where another project is called sluice."""
try:
    BUILD_VERSION = version(DISTRIBUTION)
except PackageNotFoundError:
    # A checkout that is only on PYTHONPATH.
    BUILD_VERSION = "0+checkout"
NEEDED = {
    "router": ("grpc_reflection", "jinja2", "prometheus_client", "tokenizers"),
    "detok": ("prometheus_client", "tokenizers"),
    "engine": ("numpy", "prometheus_client", "safetensors", "torch", "transformers"),
    "keeper": ("numpy", "prometheus_client"),
    "gateway": ("httptools", "prometheus_client", "starlette", "uvicorn", "uvloop"),
}
"""Packages of each extra, by the name under which they are imported."""
CHECKOUT = Path(__file__).parents[2]
"""The folder of the packages. In a checkout it has protos/, which an installation keeps inside the package."""
NOT_INSTALLED = 2
"""Exit status of a service whose packages are missing."""


def missing_packages(*extras: str) -> list[str]:
    """Packages of these extras that are not installed, sorted."""
    return sorted({name for extra in extras for name in NEEDED[extra] if find_spec(name) is None})


def how_to_install(*extras: str) -> str:
    """The command that installs these extras. torch is not in an extra, because it is installed in several ways."""
    torch = "torch " if "engine" in extras else ""
    # From a checkout the index's package must not replace it.
    package = f"-e '{CHECKOUT}" if (CHECKOUT / "protos").is_dir() else f"'{DISTRIBUTION}"
    return f"pip install {torch}{package}[{','.join(extras)}]'"


def require_extra(service: str, extra: str) -> None:
    """Exit with status 2 and one line on stderr if the extra is not installed. Call before the service's imports."""
    if missing := missing_packages(extra):
        error = f"this installation has no {', '.join(missing)}. Install with: {how_to_install(extra)}"
        print(last_line(service, error), file=sys.stderr, flush=True)
        raise SystemExit(NOT_INSTALLED)
