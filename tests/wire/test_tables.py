"""Tables in block hashes: hashes are equal if and only if tokens and rows are equal."""

from itertools import accumulate, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.hashing import block_chain, root_hash
from sluice.wire.tables import MAX_IMAGE_BYTES, MAX_TABLE_BYTES, NO_TABLES, Image, PromptTables, Table, VirtualTokens
from tests.examples import examples

VOCABULARY = 10
SIZE = 4
ROOT = root_hash("weights")

rows = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=3)
tables = st.lists(rows, min_size=1, max_size=3)
ids = st.lists(st.integers(0, VOCABULARY + 8), min_size=SIZE, max_size=4 * SIZE)


def table_of(parts: list[bytes], dtype="float16") -> Table:
    return Table.of(len(parts), 1, dtype, b"".join(part * 2 for part in parts))


def chain(prompt, given_tables, extra_ids=()) -> list[bytes]:
    virtual = VirtualTokens.of(VOCABULARY, PromptTables(tuple(map(table_of, given_tables)), tuple(extra_ids)))
    return block_chain(ROOT, prompt, SIZE, virtual.key)


def content(prompt, given_tables) -> list:
    """The content of each position: a token or a row."""
    joined = [row for each in given_tables for row in each]
    return [token if token < VOCABULARY else joined[(token - VOCABULARY) % len(joined)] for token in prompt]


def within(prompt, given_tables) -> list[int]:
    count = sum(map(len, given_tables))
    return [token if token < VOCABULARY else VOCABULARY + (token - VOCABULARY) % count for token in prompt]


@examples(500)
@given(ids, ids, tables, tables, st.data())
def test_equal_hashes_are_equal_rows(first, second, first_tables, second_tables, data):
    second = first[: data.draw(st.integers(0, len(first)))] + second
    first, second = within(first, first_tables), within(second, second_tables)
    for index, (a, b) in enumerate(zip(chain(first, first_tables), chain(second, second_tables), strict=False)):
        if a == b:
            end = (index + 1) * SIZE
            assert content(first[:end], first_tables) == content(second[:end], second_tables)


@examples(300)
@given(ids, tables, tables, ids)
def test_prefixes_are_shared_for_equal_tables_and_for_text_before_other_tables(text, given_tables, other_tables, tail):
    text = [token % VOCABULARY for token in text]
    virtual_tail = within([VOCABULARY, *tail], given_tables)
    assert chain([*text, *virtual_tail], given_tables) == chain(
        [*text, *virtual_tail], [list(each) for each in given_tables]
    )
    # Up to the first row, prefixes are shared with prompts without tables too.
    whole = len(text) // SIZE
    hashes, plain = chain([*text, *virtual_tail], given_tables), block_chain(ROOT, text, SIZE)
    assert hashes[:whole] == plain == chain([*text, *within(tail, other_tables)], other_tables)[:whole]


def test_equal_ids_of_different_rows_have_different_hashes():
    """Another position among the tables, and another dtype or shape of the same bytes."""
    prompt = [1, 2, 3, VOCABULARY + 2]
    chains = [
        chain(prompt, [[b"a", b"a"], [b"a", b"b"]]),
        chain(prompt, [[b"a"], [b"a", b"b"]]),
        chain(prompt, [[b"a", b"a", b"a"]]),
        chain(prompt, [[b"a", b"a", b"b"]]),
    ]
    assert len({each[0] for each in chains}) == len(chains)
    digests = {table_of([b"a", b"a"], dtype).digest for dtype in ("float16", "bfloat16")}
    assert len(digests | {Table.of(1, 2, "float16", b"aaaa").digest, Table.of(1, 1, "float32", b"aaaa").digest}) == 4


def test_extra_ids_separate_prompts_from_their_token_on():
    prompt, tables = [VOCABULARY, 1, 2, 3] + [5] * 8, [[b"a"]]
    plain, zeros = chain(prompt, tables), chain(prompt, tables, [0] * 12)
    assert plain == zeros
    with_extra_id = chain(prompt, tables, [0] * 5 + [7] + [0] * 6)
    assert [a == b for a, b in zip(plain, with_extra_id, strict=True)] == [True, False, False]
    # Generated tokens have no extra ids, so a later prompt may continue with them.
    assert chain([*prompt, 6, 6, 6, 6], tables, [0] * 5 + [7] + [0] * 10)[:3] == with_extra_id


def test_sizes_and_bounds():
    with pytest.raises(ValueError, match=r"2 rows of 1 float16 values must have 4 bytes \(got 3\)"):
        Table.of(2, 1, "float16", b"abc")
    half = Table.of(1, MAX_TABLE_BYTES // 4, "float16", bytes(MAX_TABLE_BYTES // 2))
    assert PromptTables((half, half)).num_rows == 2
    with pytest.raises(ValueError, match=str(MAX_TABLE_BYTES + 2)):
        PromptTables((half, half, table_of([b"a"])))
    assert not NO_TABLES
    assert not Table(bytes(16), 1, memoryview(b"ab"), 1, "float16").intact
    assert half.intact


def test_ids_refer_to_the_rows_of_all_tables():
    virtual = VirtualTokens.of(VOCABULARY, PromptTables(tuple(map(table_of, [[b"a"] * 2, [b"b"]]))))
    assert [each.first for each in virtual.placed] == [0, 2] == list(accumulate([0, 2]))
    assert virtual.occur([1, VOCABULARY])
    assert not virtual.occur([1, VOCABULARY - 1])
    assert virtual.without([1, VOCABULARY, 2]) == [1, 2]


@examples(300)
@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4))
def test_prompts_share_prefixes_up_to_the_first_different_image(first, second):
    """The images have three rows each and follow a text of five tokens."""

    def images_chain(contents: list[int]) -> list[bytes]:
        virtual = VirtualTokens.of(VOCABULARY, PromptTables(images=tuple(Image.of(3, bytes([c])) for c in contents)))
        prompt = [*range(5), *range(VOCABULARY, VOCABULARY + 3 * len(contents))]
        return block_chain(ROOT, prompt, SIZE, virtual and virtual.key)

    def shared(*both: list) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))))

    assert shared(images_chain(first), images_chain(second)) == (5 + 3 * shared(first, second)) // SIZE


def test_images_come_after_tables_and_are_bounded():
    image = Image.of(2, b"a")
    virtual = VirtualTokens.of(VOCABULARY, PromptTables((table_of([b"a"] * 3),), images=(image, Image.of(4, b"b"))))
    assert [each.first for each in virtual.placed] == [0, 3, 5]
    computed = []
    needed = virtual.computed([1, VOCABULARY + 3], lambda each: computed.append(each) or table_of([b"c"] * 2))
    assert computed == [image]
    assert [each.first for each in needed.placed] == [3]
    with pytest.raises(ValueError, match="images may have at most"):
        PromptTables(images=(Image.of(1, bytes(MAX_IMAGE_BYTES)), image))
