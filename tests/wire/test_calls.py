"""JSON between callers and ranks. Python's extensions of JSON are refused."""

import pytest

from sluice.wire.calls import MethodCall, parse_json, to_json


@pytest.mark.parametrize("value", [None, True, [1, -2.5, "é\ud800"], {"a": {"b": []}}])
def test_values_survive_a_round_trip(value):
    text = to_json(value)
    assert text.isascii()
    assert parse_json(text) == value


@pytest.mark.parametrize("text", ["", "NaN", "[-Infinity]", "{", "[" * 60_000, "9" * 5000])
def test_invalid_json_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own text
        parse_json(text)


def test_values_that_json_cannot_represent_are_refused():
    endless: list = []
    endless.append(endless)
    for value in (float("nan"), float("inf"), endless, b"x", object(), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            to_json(value)


def test_an_empty_list_of_ranks_means_all_ranks():
    assert MethodCall("m").names(7)
    assert [rank for rank in range(4) if MethodCall("m", ranks=(1, 3)).names(rank)] == [1, 3]
