"""Threads that share a kernel's rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class RowThreads:
    def __init__(self, count: int) -> None:
        """`count`: with the calling one."""
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, "rows") if count > 1 else None

    def run(self, kernel: Callable[[int, int], object], num_rows: int) -> None:
        """Calls kernel(first, last) for parts of the rows. It must not need the interpreter's lock."""
        if self._others is None or num_rows < 2:
            kernel(0, num_rows)
            return
        size = -(-num_rows // self.count)
        starts = range(size, num_rows, size)
        running = [self._others.submit(kernel, start, min(start + size, num_rows)) for start in starts]
        try:
            kernel(0, size)
        finally:
            for each in running:
                each.result()
