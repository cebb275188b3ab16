"""text_offset of completions with tokenizers of every kind: streams, whole answers and the text agree."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detok_service.decoders import Decoders, decoders_of
from gateway.answers.text_offsets import REPLACEMENT, TextOffsets
from sluice.checkpoint.vocabulary import Vocabulary
from tests.examples import examples
from tests.fakes.tokenizers import TABLES


@cache
def built(kind: str) -> tuple[Tokenizer, Vocabulary, Decoders]:
    tokenizer = TABLES[kind]()
    return tokenizer, Vocabulary(tokenizer), decoders_of(tokenizer)


def token_of(vocabulary: Vocabulary, number: int) -> str:
    return vocabulary.tokenizer.id_to_token(number)


def is_byte(vocabulary: Vocabulary, number: int) -> bool:
    """Whether the token is a byte of SentencePiece. An invalid run of them becomes one other character for each."""
    return vocabulary.reading.family == "pieces" and isinstance(
        vocabulary.reading.piece(token_of(vocabulary, number)), bytes
    )


def readable(vocabulary: Vocabulary, number: int) -> bool:
    """Whether the token is text by itself."""
    try:
        return not is_byte(vocabulary, number) and vocabulary.bytes_of(number).decode() != ""
    except UnicodeDecodeError:
        return False


@cache
def texts_and_parts(kind: str) -> tuple[list[int], list[int]]:
    """The tokens that are text by themselves, and those that are not."""
    tokenizer, vocabulary, _ = built(kind)
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    # Without ASCII bytes of SentencePiece, which are also tokens of text.
    partial = [number for number in ids if not readable(vocabulary, number) and vocabulary.bytes_of(number) > b"\x7f"]
    # Without the token of the character that invalid bytes become, if there are such bytes.
    texts = [
        number
        for number in ids
        if readable(vocabulary, number) and not (partial and vocabulary.bytes_of(number) == REPLACEMENT.encode())
    ]
    return texts, partial


@pytest.mark.parametrize("kind", TABLES)
@examples(40)
@given(data=st.data())
def test_streams_and_whole_answers_agree(kind, data):
    tokenizer, vocabulary, decoders = built(kind)
    texts, partial = texts_and_parts(kind)
    special = [tokenizer.token_to_id(text) for text in sorted(vocabulary.special)]
    one = st.sampled_from(texts) | st.sampled_from(special or texts) | st.sampled_from(partial or texts)
    tokens = data.draw(st.lists(one, min_size=1, max_size=12))
    keep = data.draw(st.sampled_from([(), tuple(sorted(vocabulary.special))[:1]]))
    omitted = vocabulary.omitted_ids(skip_special_tokens=True, keep=keep)
    decoder, stream, streamed, text = decoders.new(True, keep), TextOffsets(), [], ""
    # Empty: for example a prompt of special tokens, after which the output is the start of the text.
    prompt = data.draw(st.sampled_from([[], [next(number for number in texts if number not in special)]]))
    decoder.follow(prompt)
    for number in tokens:
        piece = decoder.feed([number])
        text += piece
        stream.add_text(piece)
        streamed.append(stream.place(vocabulary.bytes_of(number), omitted=number in omitted))
    text += decoder.flush()
    whole = TextOffsets()
    whole.add_text(text)
    offsets = [whole.place(vocabulary.bytes_of(number), omitted=number in omitted) for number in tokens]
    if prompt and not any(is_byte(vocabulary, number) for number in tokens):
        assert streamed == offsets
    for number, in_stream, offset in zip(tokens, streamed, offsets, strict=True):
        shown = vocabulary.bytes_of(number).decode(errors="ignore")
        # A blank at the start may be stripped, and the next blank be taken for it.
        if number not in omitted and readable(vocabulary, number) and shown.strip():
            assert in_stream == offset
            at_start = (shown.removeprefix(" "), shown.replace(" ", ""), f"##{shown}") if offset == 0 else ()
            assert text[offset:].startswith((shown, *at_start))
