"""The options that `/set` of `sluice chat` changes."""

from collections.abc import Mapping
from typing import Any

from sluice.client import Options

DEFAULT = "default"
KINDS: Mapping[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "stop": str,
}
"""The type of each value."""
NAMES_OF_TYPES = {int: "an integer", float: "a number"}


def read_setting(words: str) -> Options:
    """The option in "NAME VALUE"; its value is None for "default". Raises ValueError for a wrong name or value."""
    name, _, value = words.strip().partition(" ")
    if name not in KINDS:
        raise ValueError(f"unknown setting {name}; the settings are {', '.join(KINDS)}")
    return Options(**{name: _read(name, value.strip())})  # type: ignore[typeddict-item]


def describe_settings(options: Mapping[str, Any]) -> list[str]:
    """A line per setting: its value, or that the server's default applies."""
    return [f"{name} {DEFAULT if options.get(name) is None else _shown(options[name])}" for name in KINDS]


def _read(name: str, text: str) -> Any:
    if text == DEFAULT:
        return None
    kind = KINDS[name]
    if not text:
        raise ValueError(f"{name} needs a value, or {DEFAULT}")
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name} must be {NAMES_OF_TYPES[kind]} or {DEFAULT} (got {text})") from None
    return [value] if kind is str else value


def _shown(value: Any) -> str:
    return " ".join(map(repr, value)) if isinstance(value, list) else str(value)
