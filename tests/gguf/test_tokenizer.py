"""The tokenizers of GGUF files, beside those that the models were published with."""

import json

import gguf
import pytest
from tokenizers import Tokenizer

from bench.harness.models import TINY
from sluice.checkpoint.gguf import GgufError, read_gguf
from sluice.gguf.tokenizer import write_tokenizer
from tests.fakes.gguf_file import finish

TEXTS = [
    "Hello, world!", "  two spaces\n\n\ttab  ", "don't I'LL we've", "12345 678,9", "ünï cødé 日本語 🙂👍🏽",
    "def f(x):\n    return x**2",
    "<|im_start|>user\nHi<|im_end|>", "", " ", "a" * 300,
]  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>"]


def write(file, model, tokens, types, pre=None, merges=None, scores=None, **ids):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in ids.items():
        key = f"tokenizer.ggml.{name}"
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(key, value)
    finish(writer)
    return file


def of_tiny(file, pre="qwen2", **ids):
    """The bundled model's tokenizer in a GGUF file."""
    found = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {number: text for text, number in found["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    count = max(*texts, *special) + 1
    tokens = [special.get(number) or texts.get(number) or f"[unused {number}]" for number in range(count)]
    types = [3 if number in special else 1 if number in texts else 5 for number in range(count)]
    merges = [" ".join(pair) for pair in found["model"]["merges"]]
    return write(file, "gpt2", tokens, types, pre, merges, **ids)


def made(file, tmp_path) -> Tokenizer:
    write_tokenizer(read_gguf(file).fields, tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def test_a_byte_level_tokenizer(tmp_path):
    found = made(of_tiny(tmp_path / "a.gguf"), tmp_path)
    original = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for text in TEXTS:
        assert found.encode(text).ids == original.encode(text).ids, text
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "given", "first", "last"),
    [
        ("qwen2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_the_first_and_the_last_token_of_a_text(tmp_path, pre, given, first, last):
    ids = {"bos_token_id": 4092, "eos_token_id": 4093}
    found = made(of_tiny(tmp_path / "a.gguf", pre, **ids, **given), tmp_path)
    plain = found.encode("Hello", add_special_tokens=False).ids
    assert found.encode("Hello").ids == [4092] * first + plain + [4093] * last
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["add_bos_token"], settings["add_eos_token"]) == (first, last)
    assert settings["eos_token"] == found.id_to_token(4093)


def test_digits_are_split_where_the_model_splits_them(tmp_path):
    found = made(of_tiny(tmp_path / "a.gguf", "smollm"), tmp_path)
    assert all(len(token) == 1 for token in found.encode("1234567").tokens)


def test_a_sentencepiece_tokenizer(tmp_path):
    pieces = ["▁", "H", "e", "l", "o", "▁H", "ll", "▁He", "▁Hell", "▁Hello"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(len(pieces) - i) for i in range(len(pieces))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    found = made(write(tmp_path / "a.gguf", "llama", tokens, types, scores=scores, **ids), tmp_path)
    assert found.encode("Hello").tokens == ["<s>", "▁Hello"]
    text = "Hello ü\n"
    assert found.decode(found.encode(text).ids) == text


@pytest.mark.parametrize(
    ("model", "pre", "named"),
    [("bert", None, "a tokenizer of the kind 'bert'"), ("gpt2", "future", "the pre-tokenizer 'future'")],
)
def test_what_is_not_supported_is_named(tmp_path, model, pre, named):
    file = write(tmp_path / "a.gguf", model, ["a", "b"], [1, 1], pre, ["a b"])
    with pytest.raises(GgufError, match=named):
        write_tokenizer(read_gguf(file).fields, tmp_path)
