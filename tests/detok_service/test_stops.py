import pytest
from hypothesis import given
from hypothesis import strategies as st

from detok_service.stops import StopSearch, StopStrings

PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def oracle(pieces, flush, stops, min_tokens, include):
    """(text, tokens, stop) by definition: check every prefix of the text, shortest first."""
    full = ""
    for count, piece in [*enumerate(pieces, 1), (len(pieces), flush)]:
        for char in piece:
            full += char
            matches = [stop for stop in stops if full.endswith(stop)]
            if matches and count >= min_tokens:
                stop = max(matches, key=len)
                return full if include else full[: -len(stop)], count, stop
    return full, len(pieces), None


def may_grow(text, stops):
    """The longest suffix of the text that is a proper prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def run(pieces, flush, stops, min_tokens, include):
    """(text, tokens, stop), and the text shown after each token."""
    search = StopSearch(StopStrings(stops), include)
    shown, shown_after = "", []
    for count, piece in [*enumerate(pieces, 1), (len(pieces), flush)]:
        shown += search.feed(piece, count >= min_tokens)
        if search.matched is not None:
            return (shown, count, search.matched), shown_after
        shown_after.append(shown)
    return (shown + search.flush(), len(pieces), None), shown_after


@given(PIECES, st.text("ab", max_size=3), STOPS, st.integers(0, 8), st.booleans())
def test_against_the_oracle(pieces, flush, stops, min_tokens, include):
    result, _ = run(pieces, flush, stops, min_tokens, include)
    assert result == oracle(pieces, flush, stops, min_tokens, include)


@given(PIECES, STOPS, st.integers(0, 8))
def test_only_text_that_may_become_a_stop_string_is_held_back(pieces, stops, min_tokens):
    _, shown_after = run(pieces, "", stops, min_tokens, include=False)
    for count, shown in enumerate(shown_after[: len(pieces)], 1):
        text = "".join(pieces[:count])
        assert shown == text[: len(text) - may_grow(text, stops)]


@given(PIECES, STOPS)
def test_nothing_is_held_back_if_the_stop_string_is_shown(pieces, stops):
    _, shown_after = run(pieces, "", stops, 0, include=True)
    for count, shown in enumerate(shown_after[: len(pieces)], 1):
        assert shown == "".join(pieces[:count])


@pytest.mark.parametrize("stop", ["</s>", "\n\nUser:", "🙂\u200d🚀", "e\u0301", "aa"])
@pytest.mark.parametrize("include", [False, True])
def test_split_at_every_position(stop, include):
    for first in range(len(stop) + 1):
        for second in range(first, len(stop) + 1):
            pieces = ["before " + stop[:first], stop[first:second], stop[second:] + " after"]
            (text, _, stop_found), shown_after = run(pieces, "", [stop], 0, include)
            assert (text, stop_found) == ("before " + (stop if include else ""), stop)
            if not include:
                assert all("before ".startswith(shown) for shown in shown_after)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("xaby", ["ab", "abc"], "x", "ab"),
        ("xabcy", ["abc", "ab"], "x", "ab"),
        ("xabcd", ["bc", "abcd"], "xa", "bc"),
        ("xabc", ["c", "bc", "abc"], "x", "abc"),
        ("aabab", ["abab"], "a", "abab"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("ab", ["b", "b"], "a", "b"),
        ("abc", [""], "abc", None),
    ],
)
def test_overlaps_and_prefixes(text, stops, shown, matched):
    for pieces in ([text], list(text)):
        (shown_text, _, stop), _ = run(pieces, "", stops, 0, include=False)
        assert (shown_text, stop) == (shown, matched)


def test_a_stop_string_before_min_tokens_is_text():
    (text, tokens, stop), shown_after = run(["a.", "b.", "c.", "d"], "", ["."], 3, include=False)
    assert (text, tokens, stop) == ("a.b.c", 3, ".")
    assert shown_after == ["a.", "a.b."]


def test_a_stop_string_that_began_before_min_tokens_counts():
    assert run(["xa", "b"], "", ["ab"], 2, include=False)[0] == ("x", 2, "ab")


def test_a_long_search_takes_linear_time():
    class Counting(list):
        looks = 0

        def __getitem__(self, index):
            Counting.looks += 1
            return super().__getitem__(index)

    stops = StopStrings(["a" * 200 + "b", "a" * 100 + "c"])
    stops.children = Counting(stops.children)
    search = StopSearch(stops, include=False)
    text = ("a" * 199 + "x") * 50
    assert "".join(search.feed(char, True) for char in text) + search.flush() == text
    assert len(text) <= Counting.looks <= 4 * len(text)
