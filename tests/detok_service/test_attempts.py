"""Several attempts of a request: resuming, giving up and dropping attempts."""

import gc

from detok_service.decode_loop import REPLAY_SECONDS, REPLAY_TOKENS
from detok_service.stream import TextStream
from sluice.lanes.inbox import Gap
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import Hello
from sluice.wire.requests import Drop
from sluice.wire.rows import End, Started, Times
from tests.detok_service.bench import LENGTH, POISON, Bench, Letters, batch, opened, row

ABORTED = End(FinishReason.ABORTED, Times(0.0, 0.0, 0.0))


def rows(bench, address="router"):
    """(request, attempt, sequence), offset, tokens, text, whether it is the last."""
    return [
        (
            (text_row.request, text_row.attempt, text_row.sequence),
            text_row.offset,
            text_row.tokens,
            text_row.text,
            text_row.end is not None,
        )
        for text_row in bench.lanes[address].rows()
    ]


def test_a_resumed_request_continues_after_the_callers_tokens():
    bench = Bench()
    resumed = opened(1, n=4, attempt=2, resume={0: [0, 1], 3: [2]}, ended=[1])
    later = [row(1, offset, [3], LENGTH, sequence, attempt=2) for sequence, offset in [(0, 2), (2, 0), (3, 1)]]
    bench.handle(batch(*later, opens=[resumed]))
    assert sorted(rows(bench)) == [
        ((1, 2, 0), 2, [3], "d", True),
        ((1, 2, 2), 0, [3], "d", True),
        ((1, 2, 3), 1, [3], "d", True),
    ]
    assert bench.lanes["router"].batches[0].started == [Started(1, 2, 5, 2)]
    assert (bench.service.streams, bench.remembered, bench.service.decode_loop.unknown_rows) == (0, 0, 0)


def test_ended_sequences_do_not_count_towards_max_streams():
    bench = Bench(max_streams=2)
    bench.handle(batch(opens=[opened(1, n=4, attempt=2, ended=[0, 2])]))
    assert (bench.service.streams, bench.service.decode_loop.failed) == (2, {})


def test_a_stop_string_in_the_resumed_tokens_ends_the_sequence_immediately():
    bench = Bench()
    bench.handle(batch(opens=[opened(1, attempt=2, resume={0: [0, 1, 2]}, stop=("b",))]))
    assert rows(bench) == [((1, 2, 0), 3, [], "", True)]
    assert bench.texts() == {(1, 0): ("", FinishReason.STOP_STRING)}
    bench.handle(batch(row(1, 3, [3], attempt=2)), batch(row(1, 4, [], ABORTED, attempt=2)))
    assert (len(rows(bench)), bench.service.streams, bench.remembered) == (1, 0, 0)


def test_an_undecodable_resumed_token_ends_only_its_stream():
    bench = Bench()
    opens = [opened(1, attempt=2, resume={0: [0, POISON, 1]}), opened(2, attempt=2, resume={0: [0, 0]})]
    bench.handle(batch(row(1, 3, [1], LENGTH, attempt=2), row(2, 2, [1], LENGTH, attempt=2), opens=opens))
    assert bench.texts() == {(1, 0): ("", ErrorCode.TEXT_FAILED), (2, 0): ("b", FinishReason.LENGTH)}
    assert bench.service.streams == 0


def test_a_later_attempt_ends_earlier_ones_without_a_row():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), row(1, 0, [0], sequence=1), opens=[opened(1, n=2)]))
    bench.handle(batch(row(1, 1, [1]), opens=[opened(1, n=2, attempt=2, resume={0: [0]})], engine="other"))
    assert (bench.service.streams, bench.service.decode_loop.dropped, bench.remembered) == (2, 2, 2)
    bench.handle(batch(row(1, 2, [2]), row(1, 1, [1], ABORTED, sequence=1)))
    bench.handle(batch(row(1, 1, [3], LENGTH, attempt=2), row(1, 0, [4], LENGTH, 1, attempt=2), engine="other"))
    assert rows(bench)[2:] == [((1, 2, 0), 1, [3], "d", True), ((1, 2, 1), 0, [4], "e", True)]
    assert (bench.service.streams, bench.service.decode_loop.unknown_rows) == (0, 0)
    bench.handle(batch(row(1, 3, [], ABORTED)))
    assert (bench.remembered, bench.service.decode_loop.unknown_rows) == (0, 0)


def test_a_late_earlier_attempt_is_ignored():
    bench = Bench()
    bench.handle(Hello("r", "router"))
    bench.handle(batch(row(1, 0, [0], attempt=3), opens=[opened(1, attempt=3)], engine="other"))
    late_batch = batch(row(1, 0, [4]), row(1, 0, [4], sequence=1), row(1, 0, [4], attempt=2), opens=[opened(1, n=2)])
    bench.handle(late_batch, batch(row(1, 1, [1], LENGTH, attempt=3), engine="other"))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}
    assert (
        bench.service.decode_loop.stale_opens,
        bench.service.decode_loop.unknown_rows,
        bench.remembered,
    ) == (1, 0, 2)
    bench.handle(batch(row(1, 1, [], ABORTED), row(1, 1, [], ABORTED, sequence=1)))
    assert (len(rows(bench)), bench.remembered, bench.service.decode_loop.unknown_rows) == (2, 0, 0)


def test_a_repeated_open_is_ignored():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.handle(batch(row(1, 0, [0]), row(1, 1, [1], LENGTH), opens=[opened(1)]))
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}
    assert [len(text_batch.started) for text_batch in bench.lanes["router"].batches] == [1, 0]
    assert (bench.service.decode_loop.stale_opens, bench.remembered, bench.service.streams) == (1, 0, 0)


def test_a_drop_ends_an_attempt_without_a_row_and_discards_waiting_rows():
    bench = Bench()
    opens = [opened(1, n=2, stop=("b",)), opened(2)]
    bench.handle(batch(opens=opens))
    lane = bench.lanes["router"]
    lane.room = 0
    bench.handle(batch(row(1, 0, [0]), row(1, 0, [1], sequence=1), row(2, 0, [0]), opens=[opened(3)]))
    assert bench.service.waiting == 4
    bench.handle(batch(row(1, 1, [2])), Drop(1, 1), Drop(3, 1))
    assert (bench.service.waiting, bench.service.streams, bench.service.decode_loop.dropped) == (1, 1, 2)
    lane.room = 1 << 60
    bench.handle(batch(row(1, 2, [3])), batch(row(1, 3, [], ABORTED), row(1, 1, [], ABORTED, sequence=1)))
    bench.handle(batch(row(2, 1, [1], LENGTH), row(3, 0, [0], ABORTED)))
    assert bench.texts() == {(2, 0): ("ab", FinishReason.LENGTH)}
    assert [started.request for batch in lane.batches for started in batch.started] == [1, 2]
    assert (bench.service.streams, bench.remembered, bench.service.decode_loop.unknown_rows) == (0, 0, 0)


def test_a_drop_applies_to_earlier_attempts_but_not_to_later_ones():
    bench = Bench()
    bench.handle(batch(opens=[opened(1, attempt=2), opened(2, attempt=5), opened(3)]))
    bench.handle(Drop(1, 3), Drop(2, 4), Drop(9, 9))
    assert (bench.service.streams, bench.service.decode_loop.dropped) == (2, 1)
    bench.handle(batch(row(2, 0, [0], LENGTH, attempt=5), row(3, 0, [0], LENGTH)))
    assert bench.texts() == {(2, 0): ("a", FinishReason.LENGTH), (3, 0): ("a", FinishReason.LENGTH)}


def test_a_drop_that_overtakes_its_open_is_remembered():
    bench = Bench()
    bench.handle(Hello("r", "router"))
    bench.handle(Drop(1, 2))
    bench.handle(batch(row(1, 0, [0], attempt=1), opens=[opened(1, attempt=1)]))
    bench.handle(batch(row(1, 0, [0], attempt=2), opens=[opened(1, n=2, attempt=2)], engine="other"))
    assert (bench.service.streams, rows(bench), bench.service.decode_loop.stale_opens) == (0, [], 2)
    bench.handle(batch(row(1, 0, [3], LENGTH, attempt=3), opens=[opened(1, attempt=3)], engine="third"))
    assert rows(bench) == [((1, 3, 0), 0, [3], "d", True)]
    ends = [row(1, 1, [], ABORTED, sequence, attempt=2) for sequence in range(2)]
    bench.handle(batch(row(1, 1, [], ABORTED, attempt=1)), batch(*ends, engine="other"))
    assert (bench.service.streams, bench.remembered, bench.service.decode_loop.unknown_rows) == (0, 0, 0)


def test_rows_of_a_dropped_attempt_that_never_began_are_not_reported():
    bench = Bench()
    bench.handle(Hello("r", "router"))
    bench.handle(Drop(1, 2), batch(row(1, 4, [0], attempt=2)))
    assert (bench.service.decode_loop.unknown_rows, rows(bench)) == (0, [])
    bench.handle(batch(row(1, 4, [0], attempt=3)))
    assert bench.service.decode_loop.unknown_rows == 1


def test_the_number_of_remembered_drops_is_bounded():
    bench = Bench(max_streams=10)
    bench.handle(*(Drop(request, 1) for request in range(1000)))
    assert len(bench.service._table._given_up) == 10
    bench.handle(batch(opens=[opened(request) for request in (989, 990, 999)]))
    assert (bench.service.streams, bench.service.decode_loop.stale_opens) == (1, 2)


def test_the_memory_of_dropped_attempts_is_bounded():
    bench = Bench(max_streams=10)
    for request in range(100):
        bench.handle(batch(row(request, 0, [0]), opens=[opened(request, resume={0: [1, 2, 3]})], engine="crowd"))
        bench.handle(Drop(request, 1))
    assert (bench.service.streams, bench.service.waiting, bench.remembered) == (0, 0, 10)
    assert [
        gc_object
        for gc_object in gc.get_objects()
        if type(gc_object) is TextStream and gc_object.engine == ("crowd", 1)
    ] == []


class Ticking(Bench):
    """Each reading of the clock advances it by half of REPLAY_SECONDS, so each call of `handle` replays one slice."""

    def __init__(self, **options):
        super().__init__(**options)
        self.service.decode_loop._clock = self.read_clock

    def read_clock(self):
        self.now += REPLAY_SECONDS / 2 + 1e-9
        return self.now


def test_long_replays_are_decoded_in_slices_between_other_streams():
    feeds = []

    class Recording(Letters):
        def feed(self, tokens):
            feeds.append(len(tokens))
            return super().feed(tokens)

    bench = Ticking(new=Recording)
    long = [0] * (3 * REPLAY_TOKENS + 1)
    opens = [*(opened(request, attempt=2, resume={0: long}) for request in (1, 2)), opened(3)]
    bench.handle(batch(row(1, len(long), [1], attempt=2), row(3, 0, [0]), opens=opens))
    step = 0
    while bench.service.decode_loop.replaying:
        step += 1
        assert ((3, 1, 0), step - 1) in [text_row[:2] for text_row in rows(bench)]
        bench.handle(batch(row(1, len(long) + step, [2], attempt=2), row(3, step, [1])))
    assert max(feeds) <= REPLAY_TOKENS
    assert step == 5
    bench.handle(batch(row(2, len(long), [], ABORTED, attempt=2), row(1, len(long) + step + 1, [], LENGTH, attempt=2)))
    texts = bench.texts()
    assert texts[1, 0] == ("b" + "c" * step, FinishReason.LENGTH)
    assert texts[2, 0] == ("", FinishReason.ABORTED)
    assert texts[3, 0] == ("a" + "b" * step, None)


def test_streams_that_are_lost_or_dropped_during_their_replay():
    bench = Ticking()
    long = [0] * (2 * REPLAY_TOKENS)
    bench.handle(batch(opens=[opened(request, attempt=2, resume={0: long}) for request in (1, 2, 3)]))
    assert bench.service.decode_loop.replaying
    bench.handle(Drop(1, 2), batch(row(2, len(long), [1], attempt=2), row(3, len(long), [1], attempt=2)))
    bench.handle(Gap(7, 1), batch(opens=[opened(4, attempt=2, resume={0: long})]))
    while bench.service.decode_loop.replaying:
        bench.handle()
    bench.handle(batch(row(4, len(long), [1], LENGTH, attempt=2)))
    assert bench.texts() == {
        (2, 0): ("", ErrorCode.ROWS_LOST),
        (3, 0): ("", ErrorCode.ROWS_LOST),
        (4, 0): ("b", FinishReason.LENGTH),
    }
    assert bench.service.streams == 0
