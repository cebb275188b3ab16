"""Things of the user's that a setting names."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def find(value: str) -> Any:
    """What `module:name` names; the module is looked for as any other, and then in the working directory.

    Raises ValueError with the reason.
    """
    module, _, name = value.partition(":")
    if not (module and name):
        raise ValueError("it is not of the form module:name")
    try:
        with _working_directory_last():
            return getattr(import_module(module), name)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _working_directory_last() -> Iterator[None]:
    """Services run with `python -P`, so that no file in the user's folder is taken for a module of ours."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
