"""Comparisons of log-probabilities computed in different batches: their last bits differ, so ties change places."""

import pytest

NEAR_RANKS = 2
CLOSE = 1e-4


def check_ranks(actual: list[int], expected: list[int]) -> None:
    assert len(actual) == len(expected)
    assert all(abs(a - b) <= NEAR_RANKS for a, b in zip(actual, expected, strict=True))


def check_best(actual: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Compare the most likely tokens of one row. The last one may be tied with a token that is not in the list."""
    values = [value for _, value in expected]
    assert [value for _, value in actual] == pytest.approx(values, abs=CLOSE)
    for i, ((token, _), (right, value)) in enumerate(zip(actual, expected, strict=True)):
        tied = [candidate for j, candidate in enumerate(values) if j != i and abs(candidate - value) <= 2 * CLOSE]
        assert token == right or tied or i == len(expected) - 1
