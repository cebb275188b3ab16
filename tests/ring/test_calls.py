"""JSON between callers and ranks: what Python alone calls JSON is refused."""

import pytest

from sluice.ring.calls import MethodCall, parse_json, to_json


@pytest.mark.parametrize("value", [None, True, [1, -2.5, "é\ud800"], {"a": {"b": []}}])
def test_there_and_back(value):
    text = to_json(value)
    assert text.isascii()
    assert parse_json(text) == value


@pytest.mark.parametrize("text", ["", "NaN", "[-Infinity]", "{", "[" * 60_000, "9" * 5000])
def test_what_is_no_json(text):
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own text
        parse_json(text)


def test_values_that_json_cannot_hold():
    endless: list = []
    endless.append(endless)
    for value in (float("nan"), float("inf"), endless, b"x", object(), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            to_json(value)


def test_no_ranks_are_all():
    assert MethodCall("m").names(7)
    assert [rank for rank in range(4) if MethodCall("m", ranks=(1, 3)).names(rank)] == [1, 3]
