"""Lookups, which become rare if they gain less than their time costs."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.lookup import BITS, INTERVAL, Lookup, LookupSchedule

SIZES = (3, 2)
TOKENS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens, drafted):
    """The next draft token by linear search: the token after the last two occurrences of the last tokens, or after the
    only one."""
    tail = [*tokens, *drafted]
    for size in SIZES:
        if len(tail) < size:
            continue
        places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tail[-size:]]
        followed = {tokens[at + size] for at in places[-2:]}
        if followed:
            return followed.pop() if len(followed) == 1 else None
    return None


@given(begun=TOKENS, parts=st.lists(TOKENS, max_size=4), limit=st.integers(1, 9))
def test_lookup_equals_a_linear_search(begun, parts, limit):
    """Another lookup with the same prompt must not change the drafts of the first one."""
    prompt = Lookup()
    prompt.extend(begun)
    lookup, other, tokens = Lookup(prompt), Lookup(prompt), [*begun]
    other.extend([3, 2, 1, 0] * 9)
    for part in parts:
        lookup.extend(part)
        tokens += part
        expected = []
        while len(expected) < limit and (token := searched(tokens, expected)) is not None:
            expected.append(token)
        assert lookup.propose(limit) == expected


def test_too_few_tokens_find_nothing():
    lookup = Lookup()
    lookup.extend([1, 1])
    assert lookup.propose(4) == []
    lookup.extend([1])
    assert lookup.propose(1) == [1]


def test_a_draft_ends_where_continuations_differ():
    lookup = Lookup()
    lookup.extend([1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 9, 1, 2])
    assert lookup.propose(8) == [3, 4, 5]
    # The same continuation twice in a row.
    lookup.extend([3, 4, 5, 9, 1, 2])
    assert lookup.propose(8)[:4] == [3, 4, 5, 9]


def test_the_largest_ids_are_kept_apart():
    lookup, largest = Lookup(), (1 << BITS - 1) - 1
    lookup.extend([largest, largest - 1, 7, 0, largest - 1, 8, 1, largest, largest - 1])
    assert lookup.propose(2) == [7, 0]


def test_a_lookup_creates_no_work_for_the_garbage_collector():
    lookup = Lookup()
    lookup.extend([1, 2, 3])
    gc.collect()
    before = len(gc.get_objects())
    lookup.extend(range(1000))
    assert len(gc.get_objects()) - before < 50


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
