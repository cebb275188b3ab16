"""The settings file of `sluice serve`: its options as keys, and a section of settings for each service."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from sluice.ring.names import did_you_mean
from sluice.settings.read import assignable, key_of
from sluice.settings.services import SERVICES

NO_KEYS = ("config", "model_option", "settings")
"""Options that are no keys: the file itself, --model, for which the key is `model`, and --set."""


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Callback of --config: options in the file replace the defaults. Raises typer.BadParameter."""
    if file is not None:
        found, known = _read(file), [str(each.name) for each in context.command.params if each.name not in NO_KEYS]
        options = {key: value for key, value in found.items() if key in known}
        context.default_map = _options(file, options)
        context.meta[__name__] = _settings(file, {key: found[key] for key in found.keys() - options}, known)
    return file


def settings_of_file(context: typer.Context) -> list[tuple[str, Any]]:
    """Settings in the sections of the file, such as ("engine.max_batch_size", 8)."""
    return list(context.meta.get(__name__, ()))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{file} must hold keys and values, such as port: 50051")
    return found


def _settings(file: Path, found: Mapping[str, Any], options: list[str]) -> list[tuple[str, Any]]:
    """All keys that are no options."""
    settings: list[tuple[str, Any]] = []
    for key, value in found.items():
        if key in SERVICES and isinstance(value, dict | None):
            settings += [(f"{key}.{name}", each) for name, each in (value or {}).items()]
        elif key in SERVICES:
            raise typer.BadParameter(f"{file}: {key} must hold keys and values, not {value}")
        elif key in assignable():
            settings.append((key, value))
        else:
            place = f"; it is a setting: {setting.replace('.', ': ')}" if (setting := key_of(str(key))) else ""
            hint = place or did_you_mean(str(key), [*options, *SERVICES])
            raise typer.BadParameter(f"{file}: unknown key {key}{hint}")
    return settings


def _options(file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in options.items():
        if isinstance(value, dict | list):
            raise typer.BadParameter(f"{file}: {key} must have a single value, not {value}")
    # As text, they are checked like options; as a number, 2.5 would be cut to 2.
    return {
        key: value if isinstance(value, bool) else str(value) for key, value in options.items() if value is not None
    }
