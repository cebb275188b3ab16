from hypothesis import given
from hypothesis import strategies as st

from engine_worker.speculative.lookup import SIZES, Lookup

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def looked_up(tokens, most):
    """The same by search: what followed the latest earlier occurrence of the last tokens, the longest first."""
    for size in SIZES:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tokens[start + size : start + size + most]
    return []


@given(parts=st.lists(TOKENS, max_size=4), most=st.integers(1, 9))
def test_it_finds_what_a_search_finds(parts, most):
    lookup, tokens = Lookup(), []
    for part in parts:
        lookup.extend(part)
        tokens += part
        assert lookup.propose(most) == looked_up(tokens, most)
        assert lookup.num_tokens == len(tokens)


def test_too_few_tokens_find_nothing():
    lookup = Lookup()
    lookup.extend([1, 1])
    assert lookup.propose(4) == []
    lookup.extend([1])
    assert lookup.propose(4) == [1]
