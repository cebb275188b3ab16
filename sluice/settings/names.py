"""Names that users write: imports of objects by `module:name`, and hints for misspelled names."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

T = TypeVar("T")


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
    except BaseException as error:  # a user's module may also call sys.exit
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


def check_options(given: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> None:
    """Raises TypeError for a name in `given` that is not in `known`, with what to write in its place.

    `elsewhere` has what to write in place of other names, such as those of other libraries. A close name is suggested.
    """
    others = elsewhere or {}
    for name in given:
        if name not in known:
            close = [name] if name in others else get_close_matches(name, known, n=1)
            # There are many other names, so that one is always somewhat close.
            close = close or get_close_matches(name, others, n=1, cutoff=0.8)
            hints = [repr(found) if found in known else others[found] for found in close]
            raise TypeError(f"unknown option {name!r}" + "".join(f"; did you mean {hint}?" for hint in hints))


def checks_options(elsewhere: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """A decorator of classes whose constructor then raises the TypeError of `check_options`."""

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__
        known = signature(init).parameters

        @wraps(init)
        def checked(self: T, *arguments: Any, **options: Any) -> None:
            check_options(options, known, elsewhere)
            init(self, *arguments, **options)

        # By name: mypy refuses an assignment, because a subclass may have another constructor.
        setattr(kind, "__init__", checked)  # noqa: B010
        return kind

    return decorate
