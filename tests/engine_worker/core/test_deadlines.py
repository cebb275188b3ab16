"""Deadlines of requests."""

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.core.live import PRUNE_MIN_ENTRIES, Deadlines
from engine_worker.request import Request
from tests.fakes.engine import spec_of


def request(number: int, limit: float | None, now: float = 0.0) -> Request:
    return Request(spec_of([1], request=number, time_limit=limit), b"root", number, now)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=40), st.lists(st.integers(0, 39)))
def test_each_request_expires_once_at_its_deadline(limits, ended):
    deadlines = Deadlines()
    requests = [request(number, limit) for number, limit in enumerate(limits)]
    for each in requests:
        deadlines.add(each)
    for number in ended:
        if number < len(requests):
            requests[number].num_live = 0
    expired = []
    for now in range(22):
        reached = deadlines.pop_expired(now)
        assert all(each.deadline == now for each in reached)
        expired += reached
    assert set(expired) == {each for each in requests if each.num_live and each.submit.time_limit is not None}
    assert len(expired) == len(set(expired))


def test_ended_requests_with_distant_deadlines_are_pruned():
    deadlines = Deadlines()
    for number in range(10_000):
        ended = request(number, 1e6)
        deadlines.add(ended)
        if number % 100:
            ended.num_live = 0
        assert len(deadlines) <= PRUNE_MIN_ENTRIES + 2 * (number // 100 + 1) + 1
    assert len(deadlines.pop_expired(2e6)) == 100
