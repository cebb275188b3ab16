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
    first, second = Suspicion(), Suspicion()
    assert not suspects.engine_died({first: False, second: True}, None)
    assert (first.suspected, second.suspected) == (True, False)
    assert suspects.engine_died({first: False}, first)
    assert suspects.poisoned == 1


def test_deaths_with_several_running_requests_only_make_suspects(suspects):
    requests = [Suspicion(), Suspicion()]
    for _ in range(5):
        assert not suspects.engine_died(dict.fromkeys(requests, False), None)
    assert all(request.suspected for request in requests)


def test_a_death_under_a_quarantined_request_does_not_incriminate_others(suspects):
    """The others were on their way when the engine had already accepted the quarantined request."""
    quarantined, waiting = Suspicion(), Suspicion()
    suspects.engine_died({quarantined: False, waiting: False}, quarantined)
    assert (quarantined.deaths, waiting.deaths, waiting.suspected) == (1, 0, False)


def test_progress_clears_a_suspect(suspects):
    suspect = Suspicion()
    suspects.engine_died({suspect: False}, None)
    suspects.clear(suspect)
    assert (suspect.deaths, suspect.suspected) == (0, False)
    assert not suspects.engine_died({suspect: False}, suspect)
    assert not suspects.engine_died({suspect: True}, suspect)
    assert suspect.deaths == 0


def test_deaths_at_other_routers_count_but_make_no_suspect(suspects, clock):
    clock.now += OTHER_SECONDS
    suspect = Suspicion(deaths=1)
    assert not suspects.is_quarantined(suspect, 2)
    assert not Suspects(PATIENCE).engine_died({Suspicion(deaths=8): False}, None)
    assert suspects.engine_died({suspect: False}, suspect)


def test_a_router_that_has_just_started_requires_one_more_death(suspects, clock):
    suspect = Suspicion(deaths=1)
    assert [suspects.engine_died({suspect: False}, suspect) for _ in range(2)] == [False, True]
    progressed = Suspicion(deaths=1)
    suspects.clear(progressed)
    assert [suspects.engine_died({progressed: False}, progressed) for _ in range(2)] == [False, True]
    clock.now += OTHER_SECONDS
    assert suspects.engine_died({(later := Suspicion(deaths=1)): False}, later)


def test_one_more_death_is_required_if_peers_die_without_the_request(suspects, clock):
    suspect = Suspicion()
    for _ in range(OTHER_DEATHS):
        suspects.peer_died({})
    assert [suspects.engine_died({suspect: False}, suspect) for _ in range(3)] == [False, False, True]
    # Its own deaths are explained now; the others are forgotten after a while.
    clock.now += OTHER_SECONDS
    next_suspect = Suspicion()
    assert [suspects.engine_died({next_suspect: False}, next_suspect) for _ in range(2)] == [False, True]


def test_if_deaths_may_be_chance_only_a_second_death_leads_to_a_short_quarantine(suspects, clock):
    suspect = Suspicion()
    for _ in range(OTHER_DEATHS):
        suspects.peer_died({})
    suspects.engine_died({suspect: False}, None)
    assert not suspects.is_quarantined(suspect, 2)
    suspects.wait(suspect)
    assert suspects.reserved({1: 0, 2: 9}) is None
    suspects.engine_died({suspect: False}, None)
    assert suspects.is_quarantined(suspect, 2)
    clock.now += VACATE_SECONDS + 1
    assert not suspects.is_quarantined(suspect, 2)


def test_deaths_caused_by_one_poison_do_not_count_as_chance_for_the_next(suspects):
    for _ in range(3):
        suspect = Suspicion()
        assert [suspects.engine_died({suspect: False}, suspect) for _ in range(POISON_DEATHS)] == [False, True]


def test_a_suspect_gets_the_least_loaded_engine(suspects, clock):
    first, second = Suspicion(), Suspicion()
    suspects.engine_died(dict.fromkeys((first, second), False), None)
    assert suspects.is_quarantined(first, 2)
    busy = FEW_REQUESTS + 1
    assert suspects.quarantine(first, {1: busy, 2: 0}, 2) == 2
    assert suspects.quarantine(first, {1: busy, 2: busy + 1}, 2) is None
    suspects.enter_quarantine(first, 2)
    assert suspects.quarantine(second, {1: busy, 2: 1}, 2) is None
    suspects.leave_quarantine(second)
    assert suspects.reserved({1: 0, 2: 5}) == 2
    suspects.clear(first)
    assert suspects.quarantine(second, {1: busy, 2: 1}, 2) == 2
    clock.now += VACATE_SECONDS + 1
    assert suspects.quarantine(second, {1: busy, 2: busy + 1}, 2) == 1
    clock.now += PATIENCE
    assert not suspects.is_quarantined(second, 2)


def test_the_only_usable_engine_is_not_vacated_for_a_suspect(suspects):
    suspect, waiting = Suspicion(), Suspicion()
    suspects.engine_died({suspect: False}, None)
    assert suspects.quarantine(suspect, {1: 3}, 2) is None
    suspects.wait(waiting)
    assert suspects.quarantine(suspect, {1: 0}, 2) is None
    suspects.stop_waiting(waiting)
    assert suspects.quarantine(suspect, {1: 0}, 2) == 1


def test_with_a_single_engine_others_wait_only_for_a_request_suspected_twice(suspects):
    suspect = Suspicion()
    suspects.engine_died({suspect: False}, None)
    assert not suspects.is_quarantined(suspect, 1)
    suspects.engine_died({suspect: False}, None)
    assert suspects.is_quarantined(suspect, 1)
    assert suspects.quarantine(suspect, {1: 3}, 1) == 1


def test_an_engine_is_reserved_for_waiting_suspects(suspects):
    suspect = Suspicion()
    suspects.engine_died({suspect: False}, None)
    assert suspects.reserved({1: 0, 2: 9}) is None
    suspects.wait(suspect)
    assert suspects.reserved({1: 0, 2: 9}) == 1
    assert suspects.reserved({1: 0}) is None
    suspects.stop_waiting(suspect)
    assert suspects.reserved({1: 0, 2: 9}) is None


COUNT = 4
DEATHS = st.lists(st.tuples(st.frozensets(st.integers(0, COUNT - 1)), st.integers(0, COUNT - 1), st.booleans()))


@given(DEATHS)
def test_only_a_quarantined_request_is_convicted_and_only_after_two_successive_deaths(deaths):
    requests = [Suspicion() for _ in range(COUNT)]
    suspects = Suspects(PATIENCE, Clock())
    in_row = [0] * COUNT
    for stuck, alone, confirmed in deaths:
        aboard = {request: i not in stuck for i, request in enumerate(requests)}
        ended = suspects.engine_died(aboard, requests[alone] if confirmed else None)
        accused = {alone} if confirmed and alone in stuck else stuck
        for i in range(COUNT):
            in_row[i] = in_row[i] + 1 if i in accused else 0 if i not in stuck else in_row[i]
        assert [request.deaths for request in requests] == in_row
        assert ended == (confirmed and alone in stuck and in_row[alone] >= POISON_DEATHS)


@given(st.integers(0, 5), st.integers(0, 20), st.booleans())
def test_a_poison_request_is_always_convicted(company, others, joins):
    """However many other peers die, and whether or not other requests run on the engine at its first death."""
    suspects = Suspects(PATIENCE, Clock())
    for _ in range(others):
        suspects.peer_died({})
    suspect = Suspicion()
    suspects.engine_died({suspect: False} | {Suspicion(): joins for _ in range(company)}, None)
    assert any(suspects.engine_died({suspect: False}, suspect) for _ in range(2))
