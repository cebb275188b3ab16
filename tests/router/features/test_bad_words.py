"""Bad words, once they are tokenized."""

import pytest

from router.errors import RequestError
from router.features.bad_words import ban_words
from sluice.wire.params import SamplingParams


def banned(*spellings, vocab_size=10, **sampling) -> SamplingParams:
    return ban_words(SamplingParams(**sampling), spellings, vocab_size)


def test_words_of_one_token_are_token_ids():
    params = banned([[3], [4, 5]], [[6, 7], [4, 5]], bad_token_ids=(1,))
    assert params.bad_token_ids == (1, 3)
    assert params.bad_words == ((4, 5), (6, 7))


def test_words_with_tokens_that_the_model_does_not_have_are_skipped():
    params = banned([[10], [3, 10]], [[10, 3], [4, 5]])
    assert params.bad_token_ids == ()
    assert params.bad_words == ((4, 5),)


@pytest.mark.parametrize(
    ("spellings", "sampling", "field", "description"),
    [
        ([[[1]], [[]]], {}, "[1]", "has no tokens"),
        ([[[1]], [[2], [3] * 1025]], {}, "[1]", "has 1025 tokens, at most 1024 are allowed"),
        ([[[i, 1, *[2] * 40]] for i in range(100)], {"vocab_size": 100}, "", "has 4200 tokens in words of several"),
        ([[[i]] for i in range(9)], {"bad_token_ids": (9,)}, "", "bans all 10 tokens of the vocabulary"),
        ([[[1]]], {"allowed_token_ids": (1,)}, "", "bans all 1 tokens in allowed_token_ids"),
    ],
)
def test_invalid_bans_are_refused(spellings, sampling, field, description):
    with pytest.raises(RequestError) as caught:
        banned(*spellings, **sampling)
    (violation,) = caught.value.violations
    assert violation.field == f"spec.sampling.bad_words{field}"
    assert violation.description.startswith(description)
