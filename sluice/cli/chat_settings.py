"""The options that `/set` of `sluice chat` changes."""

from collections.abc import Mapping
from typing import Any

from sluice.v1.sampling_pb2 import SamplingParams

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


def read_setting(words: str) -> tuple[str, Any]:
    """An option and its value, from "NAME VALUE"; None for "default". Raises ValueError for a wrong name or value."""
    name, _, value = words.strip().partition(" ")
    if name not in KINDS:
        raise ValueError(f"unknown setting {name}; the settings are {', '.join(KINDS)}")
    return name, _read(name, value.strip())


def describe_setting(name: str, options: Mapping[str, Any], defaults: SamplingParams) -> str:
    """A setting and its value, or the server's default."""
    if (value := options.get(name)) is not None:
        return f"{name} {' '.join(map(repr, value)) if isinstance(value, list) else value}"
    of_server = {field.name: f"{number:.7g} ({DEFAULT})" for field, number in defaults.ListFields()}
    return f"{name} {of_server.get(name, DEFAULT)}"


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
