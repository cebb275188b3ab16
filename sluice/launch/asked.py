"""What a service that we start will be asked for, in whatever way."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from sluice.ring.keys import Role

PREFIXES: Mapping[Role, str] = {"router": "SLUICE_ROUTER_", "engine": "SLUICE_ENGINE_", "detok": "SLUICE_DETOK_"}


def asked_of_engine(name: str, engine_args: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """See `asked`."""
    return asked("engine", name, engine_args, environment)


def asked(role: Role, name: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """A setting by flag, environment or YAML file, in that order, as the service reads it; None: it is not set."""
    if (flag := arguments.get(name)) is not None:
        return flag
    if (variable := f"{PREFIXES[role]}{name.upper()}") in environment:
        return environment[variable]
    file = arguments.get("config") or environment.get(f"{PREFIXES[role]}CONFIG")
    return _read(Path(file)).get(name) if file else None


def _read(file: Path) -> dict[str, Any]:
    # The engine, which reads it too, says what is wrong with it.
    with suppress(OSError, ValueError, yaml.YAMLError):
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
