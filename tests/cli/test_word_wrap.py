"""Text that is wrapped while it arrives."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sluice.cli.word_wrap import WordWrapper
from tests.examples import examples


def wrapped(*parts: str, width: int = 20) -> str:
    written: list[str] = []
    wrapper = WordWrapper(written.append, width)
    # As `OutputPrinter`, which ends an output with a line break.
    for part in (*parts, "\n"):
        wrapper.write(part)
    return "".join(written).removesuffix("\n")


CODE = "```py\nx = [1, 2, 3, 4, 5, 6, 7]\n```\n"
WORDS = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1).map(" ".join)


@given(WORDS, st.integers(1, 7), st.integers(9, 30))
@examples(50)
def test_no_word_is_divided_however_the_text_is_cut(text, size, width) -> None:
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    assert wrapped(*parts, width=width) == textwrap.fill(text, width)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\n    b\n", "a\n\n    b\n"),
        ("exactly twenty chars and", "exactly twenty chars\nand"),
        ("see https://example.com/a/long/path here", "see\nhttps://example.com/a/long/path\nhere"),
        ("日本語の文章は空白がありません", "日本語の文章は空白が\nありません"),
        (f"{CODE}wrapped again after it", f"{CODE}wrapped again after\nit"),
    ],
    ids=["lines", "full", "url", "wide", "code"],
)
@pytest.mark.parametrize("size", [1, 100])
def test_a_text(text, expected, size) -> None:
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    assert wrapped(*parts) == expected


def test_only_the_last_word_is_held_back() -> None:
    written: list[str] = []
    wrapper = WordWrapper(written.append, 10)
    wrapper.write("one two th")
    assert "".join(written) == "one two"
    wrapper.write("ree four")
    assert "".join(written) == "one two\nthree"
    wrapper.write(" " + "x" * 11)
    assert "".join(written) == "one two\nthree four\n" + "x" * 11


def test_lines_of_wide_characters_fit() -> None:
    assert max(map(cell_len, wrapped("漢字" * 40, width=31).splitlines())) == 30
