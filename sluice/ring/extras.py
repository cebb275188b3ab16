"""Whether this installation has what a service needs: a client alone is installed without it."""

import sys
from importlib.util import find_spec

from sluice.ring.process import last_line

NEEDED = {
    "router": ("grpc_reflection", "jinja2", "prometheus_client", "tokenizers"),
    "detok": ("prometheus_client", "tokenizers"),
    "engine": ("numpy", "prometheus_client", "safetensors", "torch", "transformers"),
    "gateway": ("httptools", "prometheus_client", "starlette", "uvicorn", "uvloop"),
}
"""Packages by extra, named as they are imported."""
NOT_INSTALLED = 2
"""Exit status."""


def missing_packages(*extras: str) -> list[str]:
    """Sorted."""
    return sorted({name for extra in extras for name in NEEDED[extra] if find_spec(name) is None})


def how_to_install(*extras: str) -> str:
    """A command. torch is in no extra, because it is installed in more than one way."""
    torch = "torch " if "engine" in extras else ""
    return f"pip install {torch}'sluice-serve[{','.join(extras)}]'"


def require_extra(service: str, extra: str) -> None:
    """To be called before the imports of a service. Without the extra, one line on stderr and exit status 2."""
    if missing := missing_packages(extra):
        error = f"this installation has no {', '.join(missing)}: {how_to_install(extra)}"
        print(last_line(service, error), file=sys.stderr, flush=True)
        raise SystemExit(NOT_INSTALLED)
