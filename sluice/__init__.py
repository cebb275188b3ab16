"""Sluice serves large language models over gRPC: the Python library and command line.

The clients and `LLM` are imported on first access, because the services import this package too and do not need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sluice.host.installation import BUILD_VERSION

if TYPE_CHECKING:
    from sluice.client import AsyncClient, Client, SluiceError
    from sluice.executor import SamplingParams
    from sluice.llm import LLM

__version__ = BUILD_VERSION

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "SluiceError", "__version__"]

_MODULES = {
    "AsyncClient": "sluice.client",
    "Client": "sluice.client",
    "LLM": "sluice.llm",
    "SamplingParams": "sluice.executor",
    "SluiceError": "sluice.client",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")
