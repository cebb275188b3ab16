"""Small tokenizers of every kind, built in memory."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

TINY = Path(__file__).parents[2] / "sluice" / "tiny_model" / "checkpoint"
PIECES = [
    "▁",
    "▁the",
    "▁▁a",
    "the",
    "e",
    "x▁y",
    "  ",
    "é",
    "e\u0301",
    "\u0301",
    "日本",
    "🙂",
    "\n",
    "�",
    "",
    "<0xE2",
    "<0xzz>",
]
SPECIAL = ["<s>", "</s>", "<0x41>"]


def byte_level() -> Tokenizer:
    """The tiny model's tokenizer, with added tokens both inside and outside of the byte alphabet."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    added = ["<tool>", "Ġé", "日本", " x", "a b", "Ã", "ÿ\u00ad"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.add_special_tokens([AddedToken("<|end of turn|>"), AddedToken("🏁")])
    return tokenizer


def byte_char(byte: int) -> str:
    """The character by which GPT-2's vocabulary represents a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(0x100 + unprintable.index(byte))


def sentencepiece(*, fuse: bool = True, strip: bool = True) -> Tokenizer:
    """Like Llama 2's: byte fallback, ▁ for a space, one space removed at the start."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<0x+a>", *PIECES]
    tokenizer = _plain(pieces)
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    stages += [decoders.Fuse()] if fuse else []
    stages += [decoders.Strip(" ", 1, 0)] if fuse and strip else []
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def metaspace(scheme: str = "always") -> Tokenizer:
    """Like T5's."""
    tokenizer = _plain(PIECES)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def wordpiece() -> Tokenizer:
    """Like BERT's."""
    tokenizer = _plain(["a", "b", "##ing", "##s", "n't", ".", "日", "�"])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def undecided() -> Tokenizer:
    """Without a decoder: tokens are joined with spaces."""
    return _plain(PIECES)


def odd_sequence() -> Tokenizer:
    """A decoder sequence that cannot be represented by a table of bytes per token."""
    tokenizer = _plain(PIECES)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("[▁x]"), " "), decoders.Fuse()])
    return tokenizer


def panicking() -> Tokenizer:
    """The decoder panics at the empty token, id 0; "a" is id 1."""
    tokenizer = Tokenizer(models.BPE(vocab={"": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.Strip(" ", 0, 1)
    return tokenizer


def _plain(pieces: list[str]) -> Tokenizer:
    # One id in ten is unused.
    vocab = {piece: i + i // 9 for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TABLES = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without strip": lambda: sentencepiece(strip=False),
    "byte fallback alone": lambda: sentencepiece(fuse=False),
    "metaspace": metaspace,
    "metaspace, never": lambda: metaspace("never"),
    "metaspace, first": lambda: metaspace("first"),
    "wordpiece": wordpiece,
}
WINDOWS = {"no decoder": undecided, "odd sequence": odd_sequence}
