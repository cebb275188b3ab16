"""Runs a CPU kernel on its rows in several threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


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
