"""Names that users write: imports of objects by `module:name`, and hints for misspelled names."""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def find(value: str) -> Any:
    """Import `module:name`. The working directory is searched last. Raises ValueError with the reason."""
    module, _, name = value.partition(":")
    if not (module and name):
        raise ValueError("it must have the form module:name")
    # The working directory is not on the path: services run with `python -P`, so that a file in the user's folder
    # cannot shadow one of our modules.
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)


def find_function(setting: str, value: str) -> Callable[..., Any]:
    """Like `find`, for a setting that names a function. The ValueError names the setting and the value."""
    try:
        found = find(value)
    except ValueError as error:
        raise ValueError(f"{setting}: {value!r} cannot be used: {error}") from error
    if not callable(found):
        raise ValueError(f"{setting}: {value!r} cannot be used: it is not callable")
    function: Callable[..., Any] = found
    return function


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message, with the closest known name. Empty if no known name is close."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
