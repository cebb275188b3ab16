"""The settings file of `sluice serve`: its own options, as YAML."""

from pathlib import Path
from typing import Any

import typer
import yaml

from sluice.ring.names import did_you_mean

NO_KEYS = ("config", "model_option")
"""Of the file itself, and of the option that stands for the argument `model`."""


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Callback of --config: what the file says takes the place of the defaults. Raises typer.BadParameter."""
    if file is not None:
        context.default_map = _values(context, file)
    return file


def _values(context: typer.Context, file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{file} must hold keys and values, such as port: 50051")
    known = [str(each.name) for each in context.command.params if each.name not in NO_KEYS]
    for key, value in found.items():
        if key not in known:
            raise typer.BadParameter(f"{file}: unknown key {key}{did_you_mean(str(key), known)}")
        if isinstance(value, dict | list):
            raise typer.BadParameter(f"{file}: {key} must have a single value, not {value}")
    # As text, they are checked like options; as a number, 2.5 would be cut to 2.
    return {key: value if isinstance(value, bool) else str(value) for key, value in found.items() if value is not None}
