"""Searches for drafts become rare where they bring less than the time they take."""

from engine_worker.speculative.searches import INTERVAL, Searches

SPEED = 1000.0
"""Tokens a second, of steps without drafts."""
LONG, SHORT = 0.001, 0.00001


def searches_in(steps: int, searches: Searches, gained: float, seconds: float) -> int:
    """How many of so many steps had a search."""
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


def test_every_step_has_one_while_they_pay():
    assert searches_in(1000, Searches(), 2.5, LONG) == 1000
    assert searches_in(1000, Searches(), 0.03, SHORT) == 1000


def test_one_step_in_eight_has_one_while_they_do_not():
    searches = Searches()
    searches_in(100, searches, 0.0, LONG)
    assert searches_in(80 * INTERVAL, searches, 0.0, LONG) == 80
    # Drafts that cost more than they bring are worse than none.
    assert searches_in(80 * INTERVAL, searches, -1.0, SHORT) == 80


def test_the_first_that_bring_much_end_the_pauses():
    searches = Searches()
    searches_in(1000, searches, 0.0, SHORT)
    assert searches_in(2 * INTERVAL, searches, 3.0, SHORT) > INTERVAL


def test_on_a_clock_that_stands_still_they_cost_nothing():
    searches = Searches()
    for _ in range(1000):
        assert searches.due
        searches.add(0.0)
        searches.record(0.0, 0.0)


def test_steps_without_a_search_teach_nothing():
    searches = Searches()
    for _ in range(1000):
        searches.record(-5.0, SPEED)
    assert searches_in(10, searches, 1.0, LONG / 10) == 10
