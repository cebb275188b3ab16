"""The rule that convicts requests because of the engines that died under them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.requests.suspects import (
    FEW_REQUESTS,
    OTHER_DEATHS,
    OTHER_SECONDS,
    POISON_DEATHS,
    VACATE_SECONDS,
    Suspects,
    Suspicion,
)
from tests.fakes.clock import Clock

PATIENCE = 100.0


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def suspects(clock):
    return Suspects(PATIENCE, clock)


def test_a_second_death_in_quarantine_convicts(suspects):
    one, other = Suspicion(), Suspicion()
    assert not suspects.engine_died({one: False, other: True}, None)
    assert (one.suspected, other.suspected) == (True, False)
    assert suspects.engine_died({one: False}, one)
    assert suspects.poisoned == 1


def test_deaths_with_other_requests_aboard_only_make_suspects(suspects):
    both = [Suspicion(), Suspicion()]
    for _ in range(5):
        assert not suspects.engine_died(dict.fromkeys(both, False), None)
    assert all(each.suspected for each in both)


def test_a_death_under_a_quarantined_request_does_not_incriminate_others(suspects):
    """The others were on their way when the engine had already accepted the quarantined request."""
    one, late = Suspicion(), Suspicion()
    suspects.engine_died({one: False, late: False}, one)
    assert (one.deaths, late.deaths, late.suspected) == (1, 0, False)


def test_progress_clears_a_suspect(suspects):
    one = Suspicion()
    suspects.engine_died({one: False}, None)
    suspects.clear(one)
    assert (one.deaths, one.suspected) == (0, False)
    assert not suspects.engine_died({one: False}, one)
    assert not suspects.engine_died({one: True}, one)
    assert one.deaths == 0


def test_deaths_at_other_routers_count_but_make_no_suspect(suspects, clock):
    clock.now += OTHER_SECONDS
    one = Suspicion(deaths=1)
    assert not suspects.is_quarantined(one, 2)
    assert not Suspects(PATIENCE).engine_died({Suspicion(deaths=8): False}, None)
    assert suspects.engine_died({one: False}, one)


def test_a_router_that_has_just_started_requires_one_more_death(suspects, clock):
    one = Suspicion(deaths=1)
    assert [suspects.engine_died({one: False}, one) for _ in range(2)] == [False, True]
    progressed = Suspicion(deaths=1)
    suspects.clear(progressed)
    assert [suspects.engine_died({progressed: False}, progressed) for _ in range(2)] == [False, True]
    clock.now += OTHER_SECONDS
    assert suspects.engine_died({(late := Suspicion(deaths=1)): False}, late)


def test_one_more_death_is_required_if_peers_die_without_the_request(suspects, clock):
    one = Suspicion()
    for _ in range(OTHER_DEATHS):
        suspects.peer_died({})
    assert [suspects.engine_died({one: False}, one) for _ in range(3)] == [False, False, True]
    # Its own deaths are explained now; the others are forgotten after a while.
    clock.now += OTHER_SECONDS
    next_one = Suspicion()
    assert [suspects.engine_died({next_one: False}, next_one) for _ in range(2)] == [False, True]


def test_if_deaths_may_be_chance_only_a_second_death_leads_to_a_short_quarantine(suspects, clock):
    one = Suspicion()
    for _ in range(OTHER_DEATHS):
        suspects.peer_died({})
    suspects.engine_died({one: False}, None)
    assert not suspects.is_quarantined(one, 2)
    suspects.wait(one)
    assert suspects.reserved({1: 0, 2: 9}) is None
    suspects.engine_died({one: False}, None)
    assert suspects.is_quarantined(one, 2)
    clock.now += VACATE_SECONDS + 1
    assert not suspects.is_quarantined(one, 2)


def test_deaths_caused_by_one_poison_do_not_count_as_chance_for_the_next(suspects):
    for _ in range(3):
        one = Suspicion()
        assert [suspects.engine_died({one: False}, one) for _ in range(POISON_DEATHS)] == [False, True]


def test_a_suspect_gets_the_least_loaded_engine(suspects, clock):
    one, next_one = Suspicion(), Suspicion()
    suspects.engine_died(dict.fromkeys((one, next_one), False), None)
    assert suspects.is_quarantined(one, 2)
    busy = FEW_REQUESTS + 1
    assert suspects.quarantine(one, {1: busy, 2: 0}, 2) == 2
    assert suspects.quarantine(one, {1: busy, 2: busy + 1}, 2) is None
    suspects.enter_quarantine(one, 2)
    assert suspects.quarantine(next_one, {1: busy, 2: 1}, 2) is None
    suspects.leave_quarantine(next_one)
    assert suspects.reserved({1: 0, 2: 5}) == 2
    suspects.clear(one)
    assert suspects.quarantine(next_one, {1: busy, 2: 1}, 2) == 2
    clock.now += VACATE_SECONDS + 1
    assert suspects.quarantine(next_one, {1: busy, 2: busy + 1}, 2) == 1
    clock.now += PATIENCE
    assert not suspects.is_quarantined(next_one, 2)


def test_the_only_usable_engine_is_not_vacated_for_a_suspect(suspects):
    one, other = Suspicion(), Suspicion()
    suspects.engine_died({one: False}, None)
    assert suspects.quarantine(one, {1: 3}, 2) is None
    suspects.wait(other)
    assert suspects.quarantine(one, {1: 0}, 2) is None
    suspects.stop_waiting(other)
    assert suspects.quarantine(one, {1: 0}, 2) == 1


def test_with_a_single_engine_others_wait_only_for_a_request_suspected_twice(suspects):
    one = Suspicion()
    suspects.engine_died({one: False}, None)
    assert not suspects.is_quarantined(one, 1)
    suspects.engine_died({one: False}, None)
    assert suspects.is_quarantined(one, 1)
    assert suspects.quarantine(one, {1: 3}, 1) == 1


def test_an_engine_is_reserved_for_waiting_suspects(suspects):
    one = Suspicion()
    suspects.engine_died({one: False}, None)
    assert suspects.reserved({1: 0, 2: 9}) is None
    suspects.wait(one)
    assert suspects.reserved({1: 0, 2: 9}) == 1
    assert suspects.reserved({1: 0}) is None
    suspects.stop_waiting(one)
    assert suspects.reserved({1: 0, 2: 9}) is None


COUNT = 4
DEATHS = st.lists(st.tuples(st.frozensets(st.integers(0, COUNT - 1)), st.integers(0, COUNT - 1), st.booleans()))


@given(DEATHS)
def test_only_a_quarantined_request_is_convicted_and_only_after_two_successive_deaths(deaths):
    requests = [Suspicion() for _ in range(COUNT)]
    suspects = Suspects(PATIENCE, Clock())
    in_row = [0] * COUNT
    for stuck, alone, confirmed in deaths:
        aboard = {each: i not in stuck for i, each in enumerate(requests)}
        ended = suspects.engine_died(aboard, requests[alone] if confirmed else None)
        accused = {alone} if confirmed and alone in stuck else stuck
        for i in range(COUNT):
            in_row[i] = in_row[i] + 1 if i in accused else 0 if i not in stuck else in_row[i]
        assert [each.deaths for each in requests] == in_row
        assert ended == (confirmed and alone in stuck and in_row[alone] >= POISON_DEATHS)


@given(st.integers(0, 5), st.integers(0, 20), st.booleans())
def test_a_poison_request_is_always_convicted(company, others, joins):
    """Whatever else dies, and whether or not other requests are aboard at its first death."""
    suspects = Suspects(PATIENCE, Clock())
    for _ in range(others):
        suspects.peer_died({})
    one = Suspicion()
    suspects.engine_died({one: False} | {Suspicion(): joins for _ in range(company)}, None)
    assert any(suspects.engine_died({one: False}, one) for _ in range(2))
