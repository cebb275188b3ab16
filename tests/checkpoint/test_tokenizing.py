"""A long text keeps no other thread waiting while it is tokenized or decoded."""

import threading
import time

import pytest
from tokenizers import Tokenizer

from sluice.checkpoint.tokenizing import decode, encode
from tests.fakes.tokenizers import TINY

TEXT = "the quick brown fox \N{SNOWMAN} jumps over 日本語 " * 20_000


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.mark.parametrize("offsets", [False, True])
def test_the_encoding_is_that_of_the_library(tokenizer, offsets):
    text = TEXT[:1000]
    expected = tokenizer.encode(text)
    encoding = encode(tokenizer, text, add_special_tokens=True, offsets=offsets)
    assert encoding.ids == expected.ids
    assert encoding.offsets == (expected.offsets if offsets else [(0, 0)] * len(expected.ids))
    assert decode(tokenizer, encoding.ids, skip_special_tokens=True) == tokenizer.decode(expected.ids)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_meanwhile(tokenizer, work):
    ids = tokenizer.encode(TEXT).ids * 5

    def run() -> None:
        if work == "encode":
            encode(tokenizer, TEXT, add_special_tokens=True)
        else:
            decode(tokenizer, ids, skip_special_tokens=True)

    thread = threading.Thread(target=run)
    rounds = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        rounds += 1
    # With the lock held there are 1 or 2.
    assert rounds >= 5
