"""What an engine that we start will be asked for, in whatever way."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

PREFIX = "SLUICE_ENGINE_"


def asked_of_engine(name: str, engine_args: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """A setting by flag, environment or YAML file, in that order, as the engine reads it; None: nobody asks."""
    if (flag := engine_args.get(name)) is not None:
        return flag
    if (variable := f"{PREFIX}{name.upper()}") in environment:
        return environment[variable]
    file = engine_args.get("config") or environment.get(f"{PREFIX}CONFIG")
    return _read(Path(file)).get(name) if file else None


def _read(file: Path) -> dict[str, Any]:
    # The engine, which reads it too, says what is wrong with it.
    with suppress(OSError, ValueError, yaml.YAMLError):
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
