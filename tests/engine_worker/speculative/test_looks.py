"""Looks for drafts become rare where they bring less than the time they take."""

from engine_worker.speculative.looks import REST, Looks

SPEED = 1000.0
"""Tokens a second, of steps without drafts."""
LONG, SHORT = 0.001, 0.00001


def looks_in(steps: int, looks: Looks, gained: float, seconds: float) -> int:
    """How many of so many steps had a look."""
    count = 0
    for _ in range(steps):
        if looks.due:
            count += 1
            looks.add(seconds)
            looks.record(gained, SPEED)
        else:
            looks.skip()
            looks.record(0.0, SPEED)
    return count


def test_every_step_has_one_while_they_pay():
    assert looks_in(1000, Looks(), 2.5, LONG) == 1000
    assert looks_in(1000, Looks(), 0.03, SHORT) == 1000


def test_one_step_in_eight_has_one_while_they_do_not():
    looks = Looks()
    looks_in(100, looks, 0.0, LONG)
    assert looks_in(80 * REST, looks, 0.0, LONG) == 80
    # Drafts that cost more than they bring are worse than none.
    assert looks_in(80 * REST, looks, -1.0, SHORT) == 80


def test_the_first_that_bring_much_end_the_rest():
    looks = Looks()
    looks_in(1000, looks, 0.0, SHORT)
    assert looks_in(2 * REST, looks, 3.0, SHORT) > REST


def test_on_a_clock_that_stands_still_they_cost_nothing():
    looks = Looks()
    for _ in range(1000):
        assert looks.due
        looks.add(0.0)
        looks.record(0.0, 0.0)


def test_steps_without_a_look_teach_nothing():
    looks = Looks()
    for _ in range(1000):
        looks.record(-5.0, SPEED)
    assert looks_in(10, looks, 1.0, LONG / 10) == 10
