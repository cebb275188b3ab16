"""Whether this installation has what the services need: a client alone is installed without it."""

from importlib.util import find_spec

from sluice.launch.gpus import OptionsError

NEEDED = {
    "router": ("grpc_reflection", "jinja2", "prometheus_client", "tokenizers"),
    "detok": ("prometheus_client", "tokenizers"),
    "engine": ("numpy", "safetensors", "torch", "transformers"),
}
"""Packages by extra, named as they are imported."""


def check_installed() -> None:
    """Raises OptionsError."""
    missing = {extra: name for extra, names in NEEDED.items() for name in names if find_spec(name) is None}
    if missing:
        packages = ", ".join(sorted(set(missing.values())))
        extras = ",".join(NEEDED)
        raise OptionsError(
            f"this installation cannot serve, it has no {packages}: install torch, then 'sluice-serve[{extras}]'"
        )
