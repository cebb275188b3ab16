"""Compiles CPU kernels by numba, when the kernel's module is imported."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(signature: Any, options: dict[str, Any]) -> Callable[[Callable[..., None]], Any]:
    """A decorator; `signature` and `options` as of `numba.njit`."""

    def decorate(function: Callable[..., None]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:
            # No folder is writable for numba's cache: each process compiles the kernel itself, in up to 2 s.
            return numba.njit(signature, **options)(function)

    return decorate
