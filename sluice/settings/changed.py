"""The settings of a service that differ from their defaults, for its log."""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from sluice.settings.describe import settings_of
from sluice.settings.process import ProcessSettings

CREDENTIALS = re.compile(r"(?<=://)[^/]*@")
"""User and password in a URL. No other setting holds a secret: tokens and keys are in files."""
QUERY = re.compile(r"(?<=://)([^?]*\?).*")


def changed_settings(settings: ProcessSettings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name, without those that only a launcher passes."""
    described = settings_of(type(settings))
    return {
        field.name: _loggable(value)
        for field in fields(settings)
        if (value := getattr(settings, field.name)) != _default(field) and not described[field.name].launcher_only
    }


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _loggable(value: Any) -> Any:
    match value:
        case str() | Path():
            return _masked(str(value))
        case tuple():
            return [_loggable(part) for part in value]
        case dict():
            return {name: _loggable(part) for name, part in value.items()}
    return value


def _masked(text: str) -> str:
    """The text without user, password and query, if it is a URL."""
    return QUERY.sub(r"\1…", CREDENTIALS.sub("…@", text))
