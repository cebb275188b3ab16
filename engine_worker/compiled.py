"""Kernels for a CPU, compiled by numba when their module is imported."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(signature: Any, options: dict[str, Any]) -> Callable[[Callable[..., None]], Any]:
    def compile_it(function: Callable[..., None]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:
            # No folder is writable: every process compiles it, which takes up to 2 s.
            return numba.njit(signature, **options)(function)

    return compile_it
