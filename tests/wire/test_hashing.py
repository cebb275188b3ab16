import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.hashing import block_chain, root_hash, short_hash

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_chains_agree_exactly_as_far_as_full_blocks_agree(first, second, size):
    root = root_hash("weights")
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    same = sum(a == b for a, b in zip(block_chain(root, first, size), block_chain(root, second, size), strict=False))
    assert same == shared // size


def test_salt_adapter_and_neither_are_three_domains():
    assert len({root_hash("m"), root_hash("m", salt="x"), root_hash("m", adapter="x"), root_hash("mx")}) == 4


@pytest.mark.process
def test_hashes_are_equal_in_another_process():
    code = "from sluice.wire.hashing import *; print(block_chain(root_hash('m', 's'), range(32), 16)[-1].hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == block_chain(root_hash("m", "s"), range(32), 16)[-1].hex()


def test_a_short_hash_is_the_first_eight_bytes():
    assert short_hash(bytes(range(1, 17))) == 0x0102030405060708
