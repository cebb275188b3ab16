import codecs
import itertools
from collections import Counter
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from detok_service import decoders as decoder_module
from detok_service.decoders import (
    MAX_UNSETTLED,
    Decoders,
    TextError,
    TokenizerError,
    WindowDecoder,
    decoders_of,
    load_decoders,
)
from sluice.checkpoint.vocabulary import Vocabulary
from sluice.wire.rows import PROMPT_END_TOKENS
from tests.fakes.tokenizers import TABLES, TINY, WINDOWS, byte_char, byte_level, panicking, sentencepiece

KINDS = TABLES | WINDOWS
BYTE_KINDS = {"byte level": byte_char, "sentencepiece": "<0x{:02X}>".format}


@cache
def built(kind: str) -> tuple[Tokenizer, Decoders]:
    tokenizer = KINDS[kind]()
    return tokenizer, decoders_of(tokenizer)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    tokenizer, _ = built(kind)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    rare = [number for token, number in vocab.items() if not token.isascii() or token.startswith("<")]
    anything = st.integers(0, max(vocab.values()) + 3)
    return st.lists(st.one_of(anything, st.sampled_from(rare or [0])), max_size=40)


def byte_tokens(kind: str, data: bytes) -> list[int]:
    """Token ids of bytes: both kinds of vocabulary have a token for every byte."""
    tokenizer, _ = built(kind)
    tokens = [tokenizer.token_to_id(BYTE_KINDS[kind](byte)) for byte in data]
    assert None not in tokens
    return tokens


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    rows, start = [], 0
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if start >= len(tokens):
            return rows
        rows.append(tokens[start : start + size])
        start += size
    return rows


def check(kind: str, tokens: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer, decoders = built(kind)
    decoder = decoders.new(skip)
    pieces = [decoder.feed(row) for row in cut(tokens, sizes)]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_deltas_equal_decode(kind):
    @given(ids_of(kind), st.lists(st.integers(0, 5), max_size=20), st.booleans())
    def run(tokens, sizes, skip):
        check(kind, tokens, sizes, skip)

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_output_together_equal_decode(kind):
    """Except for complete characters of the prompt that the output makes invalid: they are already shown."""
    tokenizer, decoders = built(kind)
    vocabulary = Vocabulary(tokenizer)

    @given(ids_of(kind), ids_of(kind), st.lists(st.integers(0, 5), max_size=20), st.booleans())
    def run(prompt, tokens, sizes, skip):
        prompt_text = vocabulary.prompt_text(prompt, skip)
        whole = tokenizer.decode(prompt + tokens, skip_special_tokens=skip)
        decoder = decoders.new(skip)
        decoder.follow(prompt[-PROMPT_END_TOKENS:])
        text = "".join(decoder.feed(row) for row in cut(tokens, sizes)) + decoder.flush()
        if whole.startswith(prompt_text):
            assert prompt_text + text == whole

    run()


@given(
    st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode)), max_size=8).map(b"".join),
    st.lists(st.integers(0, 5), max_size=20),
)
@example(b"\xed\xa0\x80", [])
@example(b"\xf0\x9f\x99", [1, 1])
@example(b"\xf4\x90\x80\x80a", [2])
@example("é\u0301👩\u200d🚀".encode(), [])
def test_bytes_one_token_each(data, sizes):
    for kind in BYTE_KINDS:
        check(kind, byte_tokens(kind, data), sizes, False)


@given(st.text(max_size=60), st.lists(st.integers(0, 5), max_size=20))
def test_real_text_is_decoded_unchanged(text, sizes):
    tokenizer, decoders = built("byte level")
    decoder = decoders.new(skip_special_tokens=False)
    tokens = tokenizer.encode(text).ids
    assert "".join(decoder.feed(row) for row in cut(tokens, sizes)) + decoder.flush() == tokenizer.decode(
        tokens, skip_special_tokens=False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_n_tokens_does_not_depend_on_how_they_are_split(kind):
    @given(ids_of(kind), st.lists(st.integers(0, 5), max_size=20))
    def run(tokens, sizes):
        _, decoders = built(kind)
        in_rows, one_by_one = decoders.new(True), decoders.new(True)
        for row in cut(tokens, sizes):
            assert in_rows.feed(row) == "".join(one_by_one.feed([token]) for token in row)

    run()


def test_some_special_tokens_can_be_kept():
    tokenizer, decoders = built("sentencepiece")
    prompt = [tokenizer.token_to_id(token) for token in ["<s>", "e", "</s>"]]
    tokens = [tokenizer.token_to_id(token) for token in ["<s>", "▁the", "</s>", "e"]]
    for keep, start, text in [((), "e", " thee"), (("</s>", "e"), "e</s>", " the</s>e")]:
        decoder = decoders.new(True, keep)
        decoder.follow(prompt)
        assert decoder.feed(tokens[:3]) + decoder.feed(tokens[3:]) + decoder.flush() == text
        assert Vocabulary(tokenizer).prompt_text(prompt, True, keep) == start


def test_incomplete_characters_are_held_back_and_invalid_bytes_are_not():
    tokenizer, decoders = built("sentencepiece")
    decoder = decoders.new(True)
    smile = byte_tokens("sentencepiece", "🙂".encode())
    bad, letter = byte_tokens("sentencepiece", b"\xffB")
    assert [decoder.feed([token]) for token in smile] == ["", "", "", ""]
    assert decoder.feed([tokenizer.token_to_id("e")]) == "🙂e"
    assert [decoder.feed([token]) for token in [*smile, bad, letter]] == ["", "", "", "", "�����", "�"]
    assert decoder.feed([tokenizer.token_to_id("e")]) == "e"

    decoder = built("byte level")[1].new(True)
    assert [decoder.feed([token]) for token in byte_tokens("byte level", b"\xf0\xf0\xff\xf0")] == ["", "�", "��", ""]
    assert decoder.flush() == "�"
    assert decoder.flush() == ""


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xf0\x9f", b"\xe2\x82\xac\xff", b"\xf0\x9f\x99\x82"])
def test_a_long_run_of_bytes_takes_linear_time(kind, data, monkeypatch):
    """Measured in bytes passed to the UTF-8 decoder: at most four per token."""
    counts = Counter()

    def count_and_decode(data, errors, final):
        counts["bytes"] += len(data)
        return codecs.utf_8_decode(data, errors, final)

    tokenizer, decoders = built(kind)
    cycle = byte_tokens(kind, data)
    tokens = (cycle * (100_000 // len(cycle) + 1))[:100_000]
    monkeypatch.setattr(decoder_module, "utf_8_decode", count_and_decode)
    decoder = decoders.new(True)
    pieces = [decoder.feed([token]) for token in tokens]
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert 0 < counts["bytes"] <= 4 * len(tokens)
    if data != b"\xf0\x9f\x99\x82":
        assert sum(map(len, pieces[:50_000])) > 10_000


def test_the_work_per_token_of_a_window_decoder_is_bounded():
    calls = []

    def decode(tokens):
        calls.append(len(tokens))
        return "�" * len(tokens)

    decoder = WindowDecoder(decode, frozenset([7]))
    text = "".join(decoder.feed([7]) for _ in range(1000)) + decoder.flush()
    assert text == "�" * 1000
    assert max(calls) <= 2 * MAX_UNSETTLED
    assert len(calls) <= 2001


def test_a_panic_in_the_library_becomes_an_exception(capfd):
    decoder = decoders_of(panicking()).new(True)
    assert decoder.feed([1, 2]) == "ab"
    with pytest.raises(TextError):
        decoder.feed([0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("byte level", "bytes"), *((kind, "pieces") for kind in TABLES if kind != "byte level")]
    + [(kind, "window") for kind in WINDOWS],
)
def test_the_kind_of_decoder(kind, expected):
    assert built(kind)[1].kind == expected


@pytest.mark.parametrize(
    "stages",
    [
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)],
        [decoders.ByteFallback(), decoders.Strip(" ", 1, 0)],
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()],
        [decoders.Fuse(), decoders.ByteFallback()],
        [decoders.ByteFallback(), decoders.ByteLevel()],
    ],
)
def test_decoder_stages_in_an_unknown_order_use_the_window_decoder(stages):
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence(stages)
    assert decoders_of(tokenizer).kind == "window"


def test_a_sequence_of_one_decoder_stage_equals_that_stage():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert decoders_of(tokenizer).kind == "bytes"


def test_load(tmp_path):
    assert load_decoders(TINY / "tokenizer.json").kind == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_decoders(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_have_no_text(kind, token):
    decoder = built(kind)[1].new(True)
    assert decoder.feed([token]) + decoder.flush() == ""
