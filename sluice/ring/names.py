"""Names that users write: objects by `module:name`, and hints for mistyped ones."""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def find(value: str) -> Any:
    """Import `module:name`; the working directory comes last on the path. Raises ValueError with the reason."""
    module, _, name = value.partition(":")
    if not (module and name):
        raise ValueError("it is not of the form module:name")
    # Services run with `python -P`, so that no file in the user's folder shadows a module of ours.
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)


def find_function(setting: str, value: str) -> Callable[..., Any]:
    """As `find`, for a setting that names a function. The ValueError names the setting and the value."""
    try:
        found = find(value)
    except ValueError as error:
        raise ValueError(f"{setting}: {value!r} cannot be used: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting}: {value!r} cannot be used: it is not callable")
    function: Callable[..., Any] = found
    return function


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest known name; empty if none is close."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
