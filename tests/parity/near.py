"""Log-probabilities of the same tokens out of other batches: the last bits differ, and tokens that are as likely as
each other change places."""

import pytest

NEAR_RANKS = 2
CLOSE = 1e-4


def check_ranks(found: list[int], expected: list[int]) -> None:
    assert len(found) == len(expected)
    assert all(abs(a - b) <= NEAR_RANKS for a, b in zip(found, expected, strict=True))


def check_best(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """The likeliest tokens of one row. Behind the last of them there may be one that is as likely."""
    values = [value for _, value in expected]
    assert [value for _, value in found] == pytest.approx(values, abs=CLOSE)
    for i, ((token, _), (right, value)) in enumerate(zip(found, expected, strict=True)):
        alike = [other for j, other in enumerate(values) if j != i and abs(other - value) <= 2 * CLOSE]
        assert token == right or alike or i == len(expected) - 1
