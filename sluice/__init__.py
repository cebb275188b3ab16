"""Sluice serves large language models over gRPC: the Python library and command line.

The clients are imported on first access: the services import this package too, and need no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.client import AsyncClient, Client, SluiceError

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "SluiceError", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("sluice.client"), name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")
