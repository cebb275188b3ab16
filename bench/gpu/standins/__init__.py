"""Small packages in the place of those that a machine with torch and transformers alone does not have.

They do what the engine's core needs of them, and nothing else.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType

from bench.gpu.standins.logs import structlog
from bench.gpu.standins.structs import msgspec

MAKERS: Mapping[str, Callable[[], list[ModuleType]]] = {"msgspec": msgspec, "structlog": structlog}
STANDS_IN = "stands_in"
"""An attribute that only stand-ins have."""


def install() -> None:
    """Put stand-ins for what is missing where imports look first."""
    for name, make in MAKERS.items():
        if name not in sys.modules and find_spec(name) is None:
            for module in make():
                setattr(module, STANDS_IN, True)
                sys.modules[module.__name__] = module


def installed() -> tuple[str, ...]:
    """Packages that are stood in for."""
    return tuple(name for name in MAKERS if hasattr(sys.modules.get(name), STANDS_IN))
