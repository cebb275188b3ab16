"""The delay before a service that exited is restarted."""

from sluice.launch.slot import HEALTHY_SECONDS, LONGEST_SECONDS, Backoff


def test_each_consecutive_exit_doubles_the_delay() -> None:
    backoff = Backoff(100)
    assert [backoff.after(1.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    for _ in range(5000):
        assert backoff.after(1.0) == LONGEST_SECONDS


def test_healthy_uptime_resets_the_delay() -> None:
    backoff = Backoff(100)
    for _ in range(5):
        backoff.after(HEALTHY_SECONDS - 1)
    assert backoff.after(HEALTHY_SECONDS) == 0.2


def test_a_service_that_never_gets_ready_is_given_up() -> None:
    backoff = Backoff(5)
    assert None not in [backoff.after(None) for _ in range(4)]
    assert backoff.after(None) is None
    backoff = Backoff(5)
    for _ in range(10):
        assert None not in [backoff.after(None) for _ in range(4)]
        assert backoff.after(0.1) is not None
