"""The bytes of tokens, for each family of tokenizers, against the library's decode and the detokenizer's text.

A long text keeps no other thread waiting while it is tokenized or decoded.
"""

import json
import threading
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from detok_service.decoders import decoders_of
from sluice.checkpoint.vocabulary import Vocabulary, decode, encode
from tests.examples import examples
from tests.fakes.tokenizers import TABLES, TINY, WINDOWS

CORPUS = [
    "the engine sends tokens to the detokenizer, and the detokenizer sends text.",
    "def f(x):\n    return 'naïve café' + x  # 東京 🚀",
    "isn't it? they've 12 engines! we're here",
] * 4
LETTERS = sorted(set("".join(CORPUS)))
SPLIT = Regex(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+")


def byte_level_bpe(split: bool, sequence: bool = False) -> Tokenizer:
    """A tokenizer like GPT-2's, or like Llama 3's and Qwen's, whose pre-tokenizer is a sequence."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(parts) if split else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()]) if sequence else decoders.ByteLevel()
    return with_added(tokenizer)


def sentencepiece_bpe(prefix_space: bool) -> Tokenizer:
    """A tokenizer like Llama 2's and Mistral's, or like Gemma's, which adds no space before the first word."""
    trained = Tokenizer(models.BPE())
    replace = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix_space else replace
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(stages + [decoders.Strip(" ", 1, 0)] * prefix_space)
    return with_added(tokenizer)


def unigram() -> Tokenizer:
    """A tokenizer like T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, initial_alphabet=LETTERS, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    return with_added(tokenizer)


def wordpiece(cleanup: bool) -> Tokenizer:
    """A tokenizer like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("🏁")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("日本", normalized=False)])
    return tokenizer


ANY_TEXT = {
    "GPT-2": lambda: byte_level_bpe(split=False),
    "Llama 3": lambda: byte_level_bpe(split=True),
    "Llama 3, a sequence of one decoder": lambda: byte_level_bpe(split=True, sequence=True),
    "tiny model": lambda: Tokenizer.from_file(str(TINY / "tokenizer.json")),
    "Llama 2": lambda: sentencepiece_bpe(prefix_space=True),
    "Gemma": lambda: sentencepiece_bpe(prefix_space=False),
}
FAMILIES = ANY_TEXT | {
    "T5": unigram,
    "BERT": lambda: wordpiece(cleanup=True),
    "BERT without clean-up": lambda: wordpiece(cleanup=False),
}
EVERY = FAMILIES | TABLES


@cache
def built(family: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = EVERY[family]()
    return tokenizer, Vocabulary(tokenizer)


@cache
def anchor(family: str) -> int:
    """A token of one letter, which precedes other tokens so that they are not at the start of a text."""
    tokenizer, _ = built(family)
    return next(token_id for token in ("e", "a") if (token_id := tokenizer.token_to_id(token)) is not None)


def inside(family: str, ids: list[int]) -> str:
    """The text that these tokens add to a text, according to the library."""
    tokenizer, _ = built(family)
    before = tokenizer.decode([anchor(family)], skip_special_tokens=False)
    text = tokenizer.decode([anchor(family), *ids], skip_special_tokens=False)
    assert text.startswith(before)
    return text[len(before) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_joined_are_the_text(family):
    tokenizer, vocabulary = built(family)
    characters = st.characters(exclude_categories=["Cs"]) if family in ANY_TEXT else st.sampled_from(LETTERS)
    texts = st.one_of(st.text(characters, max_size=40), st.lists(st.sampled_from(CORPUS), max_size=2).map(" ".join))

    @examples(100)
    @given(texts)
    def run(text):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(map(vocabulary.bytes_of, ids)).decode()
        assert joined == inside(family, ids)
        if vocabulary.reading.family == "bytes":
            assert joined == text == tokenizer.decode(ids, skip_special_tokens=False)
        elif family in ANY_TEXT:
            assert joined.removeprefix(" ") == text.removeprefix(" ")

    run()


@pytest.mark.parametrize("family", EVERY)
def test_router_and_detokenizer_agree_on_every_id(family):
    tokenizer, vocabulary = built(family)
    decoder_for = decoders_of(tokenizer).new
    for token_id in [*vocabulary.tokens, max(vocabulary.tokens) + 1]:
        decoder = decoder_for(skip_special_tokens=False)
        before = decoder.feed([anchor(family)])
        text = decoder.feed([token_id]) + decoder.flush()
        assert vocabulary.bytes_of(token_id).decode(errors="replace") == text, vocabulary.tokens.get(token_id)
        assert text == inside(family, [token_id])
        assert before


@pytest.mark.parametrize(
    ("family", "token", "expected"),
    [
        ("Llama 2", "<0x0A>", b"\n"),
        ("Llama 2", "<0xF0>", b"\xf0"),
        ("Llama 2", "▁the", b" the"),
        ("Llama 2", "<unk>", b"<unk>"),
        ("T5", "▁the", b" the"),
        ("BERT", "##s", b"s"),
        ("BERT", "the", b" the"),
        ("Llama 3, a sequence of one decoder", "Ġthe", b" the"),
        ("GPT-2", "Ċ", b"\n"),
        ("GPT-2", "<|end|>", b"<|end|>"),
        ("Llama 2", "🏁", "🏁".encode()),
        ("GPT-2", "日本", "日本".encode()),
        ("tiny model", "<|im_end|>", b"<|im_end|>"),
    ],
)
def test_tokens(family, token, expected):
    tokenizer, vocabulary = built(family)
    assert vocabulary.bytes_of(tokenizer.token_to_id(token)) == expected


@pytest.mark.parametrize("family", EVERY)
def test_ids_without_a_token_have_no_bytes(family):
    assert built(family)[1].bytes_of(10**6) == b""


@pytest.mark.parametrize("kind", WINDOWS)
def test_tokens_whose_text_depends_on_neighbours_have_no_bytes(kind):
    vocabulary = Vocabulary(WINDOWS[kind]())
    assert vocabulary.reading.family == "window"
    assert {vocabulary.bytes_of(token) for token in vocabulary.tokens} == {b""}


def test_nested_sequences_are_flattened():
    tokenizer = EVERY["Llama 2"]()
    stages = [decoders.Replace("▁", " "), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])]
    tokenizer.decoder = decoders.Sequence(stages)
    assert Vocabulary(tokenizer).bytes_of(tokenizer.token_to_id("<0x41>")) == b"A"


def test_special_tokens_are_reported_from_added_ones():
    assert built("GPT-2")[1].special == {"<|end|>", "🏁"}


LONG_TEXT = "the quick brown fox \N{SNOWMAN} jumps over 日本語 " * 20_000


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.mark.parametrize("offsets", [False, True])
def test_the_encoding_is_that_of_the_library(tokenizer, offsets):
    text = LONG_TEXT[:1000]
    expected = tokenizer.encode(text)
    encoding = encode(tokenizer, text, add_special_tokens=True, offsets=offsets)
    assert encoding.ids == expected.ids
    assert encoding.offsets == (expected.offsets if offsets else [(0, 0)] * len(expected.ids))
    assert decode(tokenizer, encoding.ids, skip_special_tokens=True) == tokenizer.decode(expected.ids)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_meanwhile(tokenizer, work):
    ids = tokenizer.encode(LONG_TEXT).ids * 5

    def run() -> None:
        if work == "encode":
            encode(tokenizer, LONG_TEXT, add_special_tokens=True)
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
