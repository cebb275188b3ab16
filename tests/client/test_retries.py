"""When a failed request is retried."""

import threading

import pytest

from sluice.client import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    LostEvents,
    Overloaded,
    SluiceError,
    Unavailable,
    Unreachable,
    WrongServer,
)
from sluice.client.retries import LONGEST_PAUSE_SECONDS, Retries

LOST = ConnectionLost("it broke")
REFUSED = Unreachable("nothing listens there")


def new_retries(addresses: int = 1, timeout: float | None = None, retry: float = 0.0, resume: float = 60.0) -> Retries:
    return Retries(addresses, timeout, retry, resume, now=100.0)


def test_other_addresses_are_tried_before_growing_pauses() -> None:
    retries = new_retries(addresses=3, retry=1e6)
    pauses = [retries.on_failure(LOST, 100.0) for _ in range(12)]
    assert pauses[:2] == [0.0, 0.0]
    assert 0.1 <= pauses[2] <= 0.15
    assert 0.2 <= pauses[3] <= 0.3
    assert LONGEST_PAUSE_SECONDS <= pauses[-1] <= 1.5 * LONGEST_PAUSE_SECONDS
    retries.on_progress()
    assert retries.on_failure(LOST, 100.0) == 0.0


def test_the_server_suggests_the_pause() -> None:
    retries = new_retries(retry=1e6)
    for _ in range(5):
        assert 3.0 <= retries.on_failure(Overloaded("full", retry_after=3.0), 100.0) <= 4.5


def test_an_overloaded_router_does_not_change_the_router() -> None:
    with pytest.raises(Overloaded):
        new_retries(addresses=2).on_failure(Overloaded("full", retry_after=1.0), 100.0)


def test_the_resume_timeout_counts_from_the_first_failure_since_progress() -> None:
    retries = new_retries(resume=10.0)
    retries.on_admitted()
    retries.on_failure(LOST, 1000.0)
    retries.on_admitted()
    retries.on_failure(LOST, 1009.0)
    retries.on_progress()
    retries.on_failure(LOST, 1018.0)
    with pytest.raises(Unavailable):
        retries.on_failure(LOST, 1028.0)


@pytest.mark.parametrize(
    ("error", "fresh", "begun"),
    [
        (LOST, True, True),
        (LostEvents("a hole"), True, True),
        (Cancelled("by a router, or by gRPC"), True, True),
        (Overloaded("full", retry_after=1.0), True, True),
        (Overloaded("a slow client, or a message that is too long"), False, False),
        (AlreadyExists("it lives"), False, True),
        (Unavailable("none there", reason="NO_ENGINE"), True, True),
        (Unavailable("tried often", reason="ENGINE_LOST"), False, False),
        (InvalidRequest("no"), False, False),
    ],
)
def test_which_errors_are_final(error, fresh, begun) -> None:

    def is_retried(retries: Retries) -> bool:
        try:
            retries.on_failure(error, 100.0)
        except SluiceError:
            return False
        return True

    assert is_retried(new_retries(retry=60.0)) == fresh
    retries = new_retries()
    retries.on_admitted()
    assert is_retried(retries) == begun
    without_resume = new_retries(addresses=2, resume=0.0)
    without_resume.on_admitted()
    assert not is_retried(without_resume)


def test_a_request_that_kills_engines_gets_one_attempt_per_router() -> None:
    retries = new_retries(addresses=3)
    retries.on_admitted()
    lost = Unavailable("tried often", reason="ENGINE_LOST", retry_after=0.5)
    assert [retries.on_failure(lost, 100.0), retries.on_failure(lost, 100.0)] == [0.0, 0.0]
    with pytest.raises(Unavailable):
        retries.on_failure(lost, 100.0)


def test_routers_that_have_answered_are_waited_for() -> None:
    answered = threading.Event()

    def retries_after_answer(resume: float = 10.0) -> Retries:
        return Retries(1, None, 0.0, resume, 100.0, answered)

    with pytest.raises(Unreachable):
        retries_after_answer().on_failure(REFUSED, 100.0)
    retries_after_answer().on_admitted()
    draining = Unavailable("it stops", reason="DRAINING", retry_after=0.5)
    for error in (REFUSED, LOST, LostEvents("a hole"), Cancelled("not by this client"), draining):
        retries = retries_after_answer()
        assert retries.on_failure(error, 100.0) > 0
        assert retries.on_failure(error, 105.0) > 0
        with pytest.raises(Unavailable if error is REFUSED else type(error)):
            retries.on_failure(error, 111.0)
        with pytest.raises(type(error)):
            retries_after_answer(resume=0.0).on_failure(error, 100.0)
    for answer in (Overloaded("full", retry_after=1.0), Unavailable("none there", reason="NO_ENGINE")):
        with pytest.raises(type(answer)):
            retries_after_answer().on_failure(answer, 100.0)


def test_an_error_with_a_reason_counts_as_an_answer() -> None:
    answered = threading.Event()
    retries = Retries(1, None, 0.0, 10.0, 100.0, answered)
    assert retries.on_failure(Unavailable("it stops", reason="DRAINING", retry_after=0.5), 100.0) > 0
    assert answered.is_set()


@pytest.mark.parametrize("broken", [LOST, LostEvents("a hole"), Cancelled("not by this client")])
def test_a_connection_that_broke_is_worth_waiting_for(broken) -> None:
    """Even if no router has ever answered: the connection was established, so the address is right."""
    retries = new_retries(resume=10.0)
    assert retries.on_failure(broken, 100.0) > 0
    # The router may have begun the request and not have noticed that the connection broke, or have no engines yet.
    for error in (REFUSED, AlreadyExists("it lives"), Unavailable("none there", reason="NO_ENGINE"), REFUSED):
        assert retries.on_failure(error, 105.0) > 0
    with pytest.raises(Unavailable):
        retries.on_failure(REFUSED, 111.0)
    for retry, ends in ((0.0, 100.0), (20.0, 121.0)):
        without_resume = new_retries(resume=0.0, retry=retry)
        assert retry == 0.0 or without_resume.on_failure(broken, 100.0) > 0
        with pytest.raises(SluiceError):
            without_resume.on_failure(broken, ends)


def test_an_error_of_a_proxy_is_not_worth_waiting_for() -> None:
    """No connection to a router was established, unless one has answered before."""
    no_backend = Unavailable("no healthy upstream")
    with pytest.raises(Unavailable):
        new_retries(resume=10.0).on_failure(no_backend, 100.0)
    answered = threading.Event()
    answered.set()
    assert Retries(1, None, 0.0, 10.0, 100.0, answered).on_failure(no_backend, 100.0) > 0


def test_a_timeout_during_retries_names_their_cause() -> None:
    retries = new_retries(timeout=5.0)
    retries.on_failure(LOST, 104.0)
    late = "the call did not end within its timeout of 5 s"
    with pytest.raises(DeadlineExceeded, match=rf"^{late}; the call was retried because of: it broke$"):
        retries.on_failure(DeadlineExceeded("late"), 105.0)
    retries.on_progress()
    with pytest.raises(DeadlineExceeded, match=rf"^{late}$"):
        retries.on_failure(DeadlineExceeded("late"), 105.0)


def test_a_long_wait_for_a_router_is_reported_once() -> None:
    retries = new_retries(resume=60.0, timeout=50.0)
    retries.on_admitted()
    retries.on_failure(LOST, 110.0)
    assert retries.long_wait(LOST, 111.9) is None
    assert retries.long_wait(Overloaded("full", retry_after=1.0), 112.0) is None
    retries.on_failure(REFUSED, 111.9)
    assert retries.long_wait(REFUSED, 112.0) == 40.0
    assert retries.long_wait(REFUSED, 113.0) is None
    retries.on_progress()
    assert retries.long_wait(LOST, 120.0) is None
    retries.on_failure(LOST, 120.0)
    assert retries.long_wait(LOST, 122.0) == 30.0
    never_connected = new_retries(retry=60.0)
    never_connected.on_failure(REFUSED, 100.0)
    assert never_connected.long_wait(REFUSED, 110.0) is None


def test_the_last_error_says_that_there_was_a_connection() -> None:
    retries = new_retries(resume=10.0)
    retries.on_failure(LOST, 100.0)
    refused = Unreachable("failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused")
    with pytest.raises(Unavailable, match=r"was lost, and no router has answered for 11 s \(Connection refused\)"):
        retries.on_failure(refused, 111.0)
    retries = new_retries(resume=10.0)
    retries.on_failure(LOST, 100.0)
    with pytest.raises(Unavailable, match=r"for 11 s \(a:1 closes connections without TLS: check that\)"):
        retries.on_failure(WrongServer("a:1 closes connections without TLS: check that"), 111.0)


def test_the_timeout_shortens_a_pause() -> None:
    retries = new_retries(timeout=5.0, retry=1e6)
    assert (retries.time_left(101.0), retries.elapsed(101.0)) == (4.0, 1.0)
    assert retries.on_failure(Overloaded("full", retry_after=50.0), 104.0) == 1.0
    assert retries.time_left(107.0) == 0.0
    assert new_retries().time_left(107.0) is None
