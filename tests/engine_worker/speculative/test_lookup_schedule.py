"""LookupSchedule for drafts become rare if they gain less than their time costs."""

from engine_worker.speculative.lookup_schedule import INTERVAL, LookupSchedule

SPEED = 1000.0
"""Tokens per second of steps without drafts."""
LONG, SHORT = 0.001, 0.00001


def searches_in(steps: int, searches: LookupSchedule, gained: float, seconds: float) -> int:
    """The number of steps, out of `steps`, with a search."""
    count = 0
    for _ in range(steps):
        if searches.due:
            count += 1
            searches.add(seconds)
            searches.record(gained, SPEED)
        else:
            searches.skip()
            searches.record(0.0, SPEED)
    return count


def test_every_step_searches_while_searches_pay():
    assert searches_in(1000, LookupSchedule(), 2.5, LONG) == 1000
    assert searches_in(1000, LookupSchedule(), 0.03, SHORT) == 1000


def test_one_step_in_eight_searches_while_searches_do_not_pay():
    searches = LookupSchedule()
    searches_in(100, searches, 0.0, LONG)
    assert searches_in(80 * INTERVAL, searches, 0.0, LONG) == 80
    # Drafts that cost more than they gain.
    assert searches_in(80 * INTERVAL, searches, -1.0, SHORT) == 80


def test_a_large_gain_makes_searches_frequent_again():
    searches = LookupSchedule()
    searches_in(1000, searches, 0.0, SHORT)
    assert searches_in(2 * INTERVAL, searches, 3.0, SHORT) > INTERVAL


def test_with_a_clock_that_does_not_advance_searches_cost_nothing():
    searches = LookupSchedule()
    for _ in range(1000):
        assert searches.due
        searches.add(0.0)
        searches.record(0.0, 0.0)


def test_steps_without_a_search_do_not_change_the_averages():
    searches = LookupSchedule()
    for _ in range(1000):
        searches.record(-5.0, SPEED)
    assert searches_in(10, searches, 1.0, LONG / 10) == 10
