from hypothesis import given
from hypothesis import strategies as st

from bench.harness.load import Arrivals, Feed, Load, PlannedRequest
from sluice.wire.errors import FinishReason
from sluice.wire.rows import End, Times, TokenRow


def load_of(count: int, width: int) -> Load:
    return Load([PlannedRequest([1], 1)] * count, width)


@given(st.integers(0, 40), st.integers(1, 9), st.randoms())
def test_feed_returns_each_request_once_in_order_and_never_more_than_width(count, width, random):
    feed, given_, live = Feed(load_of(count, width)), [], 0
    while True:
        due = list(feed.due())
        given_ += due
        live += len(due)
        assert live == min(width, count - len(given_) + live)
        if not live:
            break
        out = random.randint(1, live)
        feed.on_ended(out)
        live -= out
    assert given_ == list(range(count))


def row(i: int, offset: int, last: bool = False) -> tuple[int, TokenRow]:
    end = End(FinishReason.LENGTH, Times(0.0, 0.0, 0.0)) if last else None
    return i, TokenRow(i, 0, 0, offset, [7], [], end)


def test_timed_requests_arrive_at_their_time_after_the_first_tokens_of_the_initial_requests():
    arrivals = Arrivals(Load([PlannedRequest([1], 2), PlannedRequest([2], 2), PlannedRequest([3], 1, 0.5)], width=2))
    assert list(arrivals.due(0.0)) == [(0, 0.0), (1, 0.0)]
    arrivals.on_rows(1.0, [row(0, 0)])
    assert list(arrivals.due(9.0)) == []
    arrivals.on_rows(2.0, [row(0, 1, last=True), row(1, 0)])
    assert list(arrivals.due(2.4)) == []
    assert not arrivals.over
    assert list(arrivals.due(2.9)) == [(2, 2.5)]
    arrivals.on_rows(3.0, [row(1, 1, last=True)])
    assert not arrivals.over
    arrivals.on_rows(4.0, [row(2, 0, last=True)])
    assert list(arrivals.due(4.0)) == []
    assert arrivals.over


def test_without_timed_requests_the_load_is_over_when_the_last_request_has_ended():
    arrivals = Arrivals(Load([PlannedRequest([1], 1), PlannedRequest([2], 1)], width=1))
    for i in range(2):
        assert list(arrivals.due(float(i))) == [(i, float(i))]
        assert not arrivals.over
        arrivals.on_rows(float(i), [row(i, 0, last=True)])
    assert list(arrivals.due(2.0)) == []
    assert arrivals.over
