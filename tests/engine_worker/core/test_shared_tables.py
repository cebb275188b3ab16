"""Equal prompt tables and images of live requests are kept once; their total size is limited."""

import dataclasses

import pytest
from msgspec.structs import replace

from engine_worker.core import intake
from sluice.wire.tables import Image, PromptTables
from tests.fakes.engine import VOCAB, EngineBench, spec_of
from tests.fakes.tables import random_table

ROWS = 3


@pytest.fixture
def bench():
    return EngineBench()


def send(bench, *seeds: int) -> int:
    """Send a request whose tables share no memory with others; returns its number."""
    tables = [random_table(ROWS, bench.runner.hidden_size, seed) for seed in seeds]
    number = len(bench.specs) + 1
    ids = [*range(VOCAB, VOCAB + ROWS * len(seeds)), 1, 2]
    bench.send(spec_of(ids, 4, request=number, tables=PromptTables(tuple(tables))))
    return number


def live_tables(bench) -> list:
    return [table for request in bench.engine.live.requests.values() for table in request.extras.tables.tables]


def test_equal_tables_share_memory(bench):
    for seeds in ((1,), (1, 2), (1, 1)):
        send(bench, *seeds)
    bench.step()
    assert len(live_tables(bench)) == 5
    assert len(set(map(id, live_tables(bench)))) == 2
    assert bench.engine.live.tables.num_bytes == 2 * ROWS * bench.runner.hidden_size * 4
    bench.run()
    assert bench.engine.live.tables.num_bytes == 0


def test_tables_of_live_requests_are_bounded(bench, monkeypatch):
    size = len(random_table(ROWS, bench.runner.hidden_size, 1).data)
    monkeypatch.setattr(intake, "MAX_LIVE_TABLE_BYTES", 2 * size)
    numbers = [send(bench, *seeds) for seeds in ((1,), (2,), (1, 2), (3,))]
    bench.step()
    fault = bench.stream(numbers[3]).end.fault
    assert fault.code == "OVERLOADED"
    assert f"would have {3 * size} bytes, the limit is {2 * size}" in fault.message
    bench.run()
    last = send(bench, 3)
    bench.run()
    for number in (*numbers[:3], last):
        assert bench.stream(number).end.fault is None


@pytest.mark.parametrize("columns", [0, 1])
def test_equal_images_share_memory(bench, monkeypatch, columns):
    def send_image(data: bytes, number: int, **changed) -> None:
        # A copy, which shares no memory with others.
        image = replace(Image.of(ROWS, bytes(bytearray(data)), columns), **changed)
        bench.send(spec_of([*range(VOCAB, VOCAB + ROWS), 1], 4, request=number, tables=PromptTables(images=(image,))))

    refusals = bench.engine.intake._refusals
    limits = dataclasses.replace(refusals.limits, image_rows=ROWS)
    bench.engine.intake._refusals = dataclasses.replace(refusals, limits=limits)
    monkeypatch.setattr(intake, "MAX_LIVE_TABLE_BYTES", 8)
    for number, data in enumerate((b"some", b"some", b"more", b"x"), 1):
        send_image(data, number)
    known = Image.of(ROWS, b"some", columns)
    send_image(b"same", 5, digest=known.digest, columns=3 if columns == 1 else 1)
    bench.step()
    images = [each for request in bench.engine.live.requests.values() for each in request.extras.tables.images]
    assert [bytes(each.data) for each in images] == [b"some", b"some", b"more"]
    assert images[0] is images[1]
    assert bench.engine.live.tables.num_bytes == 8
    assert bench.fault(4) == "OVERLOADED"
    assert bench.fault(5) == "INVALID_ARGUMENT"
    bench.run()
    assert bench.engine.live.tables.num_bytes == 0


def test_a_known_digest_with_another_shape_is_refused(bench):
    send(bench, 1)
    bench.step()
    table = random_table(ROWS, bench.runner.hidden_size, 1)
    wrong = replace(random_table(ROWS + 1, bench.runner.hidden_size, 2), digest=table.digest)
    number = len(bench.specs) + 1
    bench.send(spec_of([VOCAB + ROWS, 1], 4, request=number, tables=PromptTables((wrong,))))
    bench.step()
    assert bench.fault(number) == "INVALID_ARGUMENT"
    bench.run()
