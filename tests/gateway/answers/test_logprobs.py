"""Log-probabilities of completions: tokens that are parts of characters, and where tokens begin in the text."""

import pytest

from gateway.answers.logprobs import of_chat, of_completion, of_prompt
from gateway.answers.text_offsets import TextOffsets
from sluice.client import TokenLogprob

SNOWMAN = "☃".encode()


def entry(token: bytes, logprob: float | None = -1.0, top: list[tuple[bytes, float]] | None = None) -> TokenLogprob:
    ranked = [TokenLogprob(9, text, value, rank, ()) for rank, (text, value) in enumerate(top or [], 1)]
    return TokenLogprob(7, token, logprob, 2, tuple(ranked))


def test_parts_of_characters_are_told_apart():
    chosen = entry(SNOWMAN[1:], -3.0, [(SNOWMAN[:2], -0.5), (b"a", -1.0)])
    columns = of_completion([chosen], 2, TextOffsets())
    assert columns.tokens == ["bytes:\\x98\\x83"]
    assert columns.top_logprobs == [{"bytes:\\xe2\\x98": -0.5, "a": -1.0, "bytes:\\x98\\x83": -3.0}]
    assert of_prompt([entry(b"x", None), chosen]) == [None, columns.top_logprobs[0]]
    (chat,) = of_chat([chosen]).content
    assert (chat.token, chat.bytes, chat.top_logprobs[0].token) == (
        "bytes:\\x98\\x83",
        [0x98, 0x83],
        "bytes:\\xe2\\x98",
    )


def test_the_chosen_token_does_not_overwrite_a_better_one_with_the_same_text():
    """lm-eval calls a token greedy if its log-probability is the maximum of its `top_logprobs`."""
    (top,) = of_completion([entry(b"a", -3.0, [(b"a", -0.5), (b"b", -1.0)])], 2, TextOffsets()).top_logprobs
    assert top == {"a": -0.5, "b": -1.0}


OFFSETS = {
    "plain": (["Hello", ", ", "world"], [0, 5, 7], "Hello, world"),
    "a split character": (["a ", SNOWMAN[:1], SNOWMAN[1:2], SNOWMAN[2:], "!", "b"], [0, 2, 2, 2, 3, 4], "a ☃!b"),
    "the end of one and the start of the next": (
        [SNOWMAN[:2], SNOWMAN[2:] + SNOWMAN[:1], SNOWMAN[1:], "!"],
        [0, 0, 1, 2],
        "☃☃!",
    ),
    "no character": (["a", b"\xff", "b"], [0, 1, 2], "a\N{REPLACEMENT CHARACTER}b"),
    "half a character": (["a", SNOWMAN[:2], "b"], [0, 1, 2], "a\N{REPLACEMENT CHARACTER}b"),
    "half a surrogate, then a character": (
        [b"\xed", b"\xbd", SNOWMAN[:1], SNOWMAN[1:], "b"],
        [0, 0, 2, 2, 3],
        2 * "\N{REPLACEMENT CHARACTER}" + "☃b",
    ),
    "bytes of SentencePiece": (
        ["a", SNOWMAN[:1], SNOWMAN[1:2], b"\xff", "b", "c"],
        [0, 1, 1, 2, 4, 5],
        "a" + 3 * "\N{REPLACEMENT CHARACTER}" + "bc",
    ),
    "WordPiece's mark": (["s", " a"], [0, 3], "##s a"),
    "a blank of two": ([" ", " you", "r"], [0, 0, 4], " your"),
    "every blank stripped": (["  a", " b"], [0, 1], "a b"),
    "special tokens": (["<s>", "Hi", "<|end|>", "<|im|>", " you"], [0, 0, 2, 2, 2], "Hi you"),
    "special tokens that are shown": (["<s>", "Hi", "<|end|>", " you"], [0, 3, 5, 12], "<s>Hi<|end|> you"),
    "a special token before its own beginning": (["<s>", "<", "b"], [0, 0, 1], "<b"),
    "a stripped space": (["<s>", " Hello", " you"], [0, 0, 5], "Hello you"),
    "nothing but a stripped space": ([" ", "Hello", " you"], [0, 0, 5], "Hello you"),
    "a space that stays": ([" Hello", " you"], [0, 6], " Hello you"),
    "a text cut by a stop string": (["Hello", " you", "!"], [0, 5, 9], "Hello y"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(name):
    tokens, expected, text = OFFSETS[name]
    pieces = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    offsets = TextOffsets()
    offsets.add_text(text)
    assert [offsets.place(piece) for piece in pieces] == expected


@pytest.mark.parametrize("name", ["plain", "a split character", "special tokens that are shown", "a stripped space"])
@pytest.mark.parametrize("held", [0, 2])
def test_offsets_in_a_stream(name, held):
    """`held`: number of characters that are held back. They count as shown, so that they change no offset."""
    tokens, expected, text = OFFSETS[name]
    offsets, sent = TextOffsets(), 0
    for token, here, following in zip(tokens, expected, [*expected[1:], len(text)], strict=True):
        until = max(sent, following - held)
        offsets.add_text(text[sent:until])
        sent = until
        placed = offsets.place(token if isinstance(token, bytes) else token.encode())
        assert placed == here or (name == "a stripped space" and held)
    offsets.add_text(text[sent:])
    assert offsets.place(b"x") == len(text)


def test_a_special_token_in_a_stream_does_not_move_later_tokens():
    offsets = TextOffsets()
    for text, token, expected in (
        ("Hi", b"Hi", 0), ("", b"<|end|>", 2), ("", b"<|im|>", 2), (" you", b" you", 2), ("", b"<", 6), ("<|", b"|", 7),
    ):  # fmt: skip
        offsets.add_text(text)
        assert offsets.place(token, omitted=len(token) > 4) == expected
