from hypothesis import given
from hypothesis import strategies as st

from bench.load import Ask, Feed, Load


def load_of(count: int, width: int, static: bool) -> Load:
    return Load([Ask([1], 1)] * count, width, static=static)


@given(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.randoms())
def test_feed_hands_out_each_request_once_in_order_and_never_more_than_width(count, width, static, random):
    feed, given_, live = Feed(load_of(count, width, static)), [], 0
    while True:
        due = list(feed.due())
        given_ += due
        live += len(due)
        assert live <= width
        if not static:
            assert live == min(width, count - len(given_) + live)
        if not live:
            break
        out = random.randint(1, live)
        feed.ended(out)
        live -= out
    assert given_ == list(range(count))


def test_static_groups_wait_for_their_slowest():
    feed = Feed(load_of(5, 2, static=True))
    assert list(feed.due()) == [0, 1]
    feed.ended()
    assert list(feed.due()) == []
    feed.ended()
    assert list(feed.due()) == [2, 3]


def test_in_flight_the_next_goes_in_as_soon_as_one_is_out():
    feed = Feed(load_of(5, 2, static=False))
    assert list(feed.due()) == [0, 1]
    feed.ended()
    assert list(feed.due()) == [2]
