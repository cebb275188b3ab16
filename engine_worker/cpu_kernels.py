"""Helpers for CPU kernels: numba compiles a kernel when its module is imported, and several threads share its rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


class RowThreads:
    def __init__(self, count: int) -> None:
        """`count`: threads, the calling one included."""
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "rows") if count > 1 else None

    def run(self, kernel: Callable[[int, int], object], num_rows: int) -> None:
        """Call kernel(start, end) for consecutive parts of the rows and wait for all. The kernel should release the
        interpreter's lock."""
        if self._pool is None or num_rows < 2:
            kernel(0, num_rows)
            return
        size = -(-num_rows // self.count)
        starts = range(size, num_rows, size)
        running = [self._pool.submit(kernel, start, min(start + size, num_rows)) for start in starts]
        try:
            kernel(0, size)
        finally:
            for future in running:
                future.result()
