"""structlog, as far as the engine's core names it: types in signatures. Loggers are handed in."""

from types import ModuleType
from typing import Any


class BoundLogger:
    """A type."""


def structlog() -> list[ModuleType]:
    """The package and the parts of it that are named."""
    package, stdlib, typing = (ModuleType(name) for name in ("structlog", "structlog.stdlib", "structlog.typing"))
    package.stdlib, package.typing = stdlib, typing  # type: ignore[attr-defined]
    stdlib.BoundLogger = BoundLogger  # type: ignore[attr-defined]
    for name in ("EventDict", "ExcInfo", "Processor", "WrappedLogger"):
        setattr(typing, name, Any)
    return [package, stdlib, typing]
