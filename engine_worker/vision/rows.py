"""A cache of the embedding rows of images, by digest. A separate thread computes them before a request runs.

All state belongs to the engine's thread; the separate thread only converts an image to rows.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from engine_worker.protocol import ImageUsage
from sluice.pictures import PictureError
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.tables import Image, Table

Encode = Callable[[Image], Table]
"""Computes the rows of an image. Raises PictureError if the data is not a valid image."""


class Encoding:
    """The computation of a request's images; see `engine_worker.protocol.Preparation`."""

    def __init__(self, rows: "ImageRows") -> None:
        self.done = False
        self.fault: Fault | None = None
        self.missing: set[bytes] = set()
        """Digests of the images whose rows are not computed yet."""
        self._rows = rows

    def poll(self) -> bool:
        self._rows.advance()
        return self.done

    def withdraw(self) -> None:
        self._rows.withdraw(self)

    def end(self, digest: bytes, fault: Fault | None) -> None:
        self.missing.discard(digest)
        self.fault = self.fault or fault
        self.done = not self.missing or fault is not None


class _EncodedImage(NamedTuple):
    future: "Future[Table]"
    waiting: list[Encoding]


class ImageRows:
    def __init__(self, encode: Encode, per_image: int, max_bytes: int, on_thread: Callable[[], None]) -> None:
        """`per_image`: see `Runner.image_rows`. `max_bytes`: limit on the size of cached rows. `on_thread`: called
        first in the separate thread."""
        self.per_image = per_image
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Table] = OrderedDict()
        """By digest, the most recently used last."""
        self._bytes = self._evictions = 0
        self._lookups = Counter({"hit": 0, "miss": 0, "recomputed": 0})
        self._pending: dict[bytes, _EncodedImage] = {}
        self._thread = ThreadPoolExecutor(1, "images", on_thread)
        self._one_at_a_time = threading.Lock()

    @property
    def usage(self) -> ImageUsage:
        """For any thread."""
        return ImageUsage(len(self._kept), self._bytes, self._max_bytes, self._evictions, self._lookups)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def prepare(self, images: Sequence[Image]) -> Encoding | None:
        """Start computing the rows that are not cached; None if all are cached."""
        self.advance()
        encoding = Encoding(self)
        for image in images:
            self._lookups["hit" if image.digest in self._kept else "miss"] += 1
            if image.digest in self._kept:
                self._kept.move_to_end(image.digest)
            elif image.digest not in encoding.missing:
                encoding.missing.add(image.digest)
                pending = self._pending.get(image.digest)
                if pending is None:
                    pending = _EncodedImage(self._thread.submit(self._compute, image), [])
                    self._pending[image.digest] = pending
                pending.waiting.append(encoding)
        return encoding if encoding.missing else None

    def advance(self) -> None:
        """Cache the rows that the thread has computed. Never waits."""
        for digest, (future, waiting) in list(self._pending.items()):
            if not future.done():
                continue
            del self._pending[digest]
            error = future.exception()
            if error is None:
                self._keep(digest, future.result())
            for encoding in waiting:
                encoding.end(digest, None if error is None else _fault(error))

    def withdraw(self, encoding: Encoding) -> None:
        """Cancel computations that no other request waits for, unless they have started."""
        for digest in encoding.missing:
            pending = self._pending.get(digest)
            if pending is None:
                continue
            pending.waiting.remove(encoding)
            if not pending.waiting and pending.future.cancel():
                del self._pending[digest]

    def table(self, image: Image) -> Table:
        """The rows of an image. They are computed again, immediately, if they were evicted since the request began.
        Requests do not keep rows, so memory is bounded however many requests wait or are paused."""
        table = self._kept.get(image.digest)
        if table is None:
            self._lookups["recomputed"] += 1
            table = self._compute(image)
            self._keep(image.digest, table)
        self._kept.move_to_end(image.digest)
        return table

    def _compute(self, image: Image) -> Table:
        # Modules of transformers are not thread-safe.
        with self._one_at_a_time:
            return self._encode(image)

    def _keep(self, digest: bytes, table: Table) -> None:
        if digest in self._kept:
            return
        self._kept[digest] = table
        self._bytes += len(table.data)
        # The latest rows stay even if they exceed the limit.
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1].data)
            self._evictions += 1


def _fault(error: BaseException) -> Fault:
    if isinstance(error, PictureError):
        return Fault(ErrorCode.INVALID_ARGUMENT.name, f"an image {error}", field="spec.images")
    return Fault(ErrorCode.STEP_FAILED.name, f"the rows of an image could not be computed: {error}")
