"""The rows of images are computed once, shared and bounded; a failure only affects the requests for that image."""

import threading

import pytest

from engine_worker.vision.rows import ImageRows
from sluice.pictures import PictureError
from sluice.wire.tables import Image, Table
from tests.fakes.lanes import until
from tests.fakes.processes import LIMIT

ONE, OTHER, THIRD = (Image.of(2, data) for data in (b"one", b"other", b"third"))
TABLE_BYTES = 2 * 4 * 4


class Encoder:
    """Blocks while `open` is cleared."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []
        self.error: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def __call__(self, image: Image) -> Table:
        self.encoded.append(bytes(image.data))
        self.open.wait(LIMIT)
        if self.error is not None:
            raise self.error
        return Table(image.digest, 2, memoryview(bytes(TABLE_BYTES)), 4, "float32")


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def rows(encoder):
    image_rows = ImageRows(encoder, 2, 2 * TABLE_BYTES, lambda: None)
    yield image_rows
    encoder.open.set()
    image_rows.close()


def finished(preparation) -> None:
    until(preparation.poll)


def test_requests_share_rows(rows, encoder):
    encoder.open.clear()
    first, second = rows.prepare([ONE, OTHER, ONE]), rows.prepare([OTHER])
    assert not first.poll()
    assert not second.poll()
    encoder.open.set()
    finished(first)
    finished(second)
    assert first.fault is second.fault is None
    assert encoder.encoded == [b"one", b"other"]
    assert rows.prepare([OTHER, ONE]) is None
    assert rows.table(ONE).digest == ONE.digest
    assert len(encoder.encoded) == 2


def test_the_least_recently_used_rows_are_evicted_and_computed_again(rows, encoder):
    finished(rows.prepare([ONE, OTHER]))
    rows.table(ONE)
    finished(rows.prepare([THIRD]))
    rows.table(ONE)
    assert encoder.encoded == [b"one", b"other", b"third"]
    assert rows.table(OTHER).digest == OTHER.digest
    assert encoder.encoded == [b"one", b"other", b"third", b"other"]
    assert rows.prepare([OTHER, ONE]) is None
    usage = rows.usage
    assert usage.lookups == {"hit": 2, "miss": 3, "recomputed": 1}
    assert (usage.images, usage.evictions, usage.used_bytes) == (2, 2, usage.max_bytes)


@pytest.mark.parametrize(
    ("error", "code"), [(PictureError("is broken"), "INVALID_ARGUMENT"), (RuntimeError("out of memory"), "STEP_FAILED")]
)
def test_a_failure_ends_only_the_requests_that_wait_for_it(rows, encoder, error, code):
    finished(rows.prepare([ONE]))
    encoder.error = error
    failed = rows.prepare([ONE, OTHER])
    finished(failed)
    assert failed.fault.code == code
    assert str(error) in failed.fault.message
    encoder.error = None
    repeated = rows.prepare([OTHER])
    finished(repeated)
    assert repeated.fault is None


def test_images_without_waiting_requests_are_not_computed(rows, encoder):
    encoder.open.clear()
    started, waiting, withdrawn = rows.prepare([ONE]), rows.prepare([OTHER]), rows.prepare([OTHER, THIRD])
    withdrawn.withdraw()
    encoder.open.set()
    finished(started)
    finished(waiting)
    finished(rows.prepare([THIRD]))
    assert encoder.encoded == [b"one", b"other", b"third"]
    cancelled = ImageRows(encoder, 2, TABLE_BYTES, lambda: None)
    encoder.open.clear()
    first, second = cancelled.prepare([ONE]), cancelled.prepare([OTHER])
    second.withdraw()
    encoder.open.set()
    finished(first)
    cancelled.close()
    assert encoder.encoded.count(b"other") == 1
