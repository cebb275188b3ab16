"""text_offset of completions with tokenizers of every kind: streams, whole answers and the text agree."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detok_service.decoders import Decoders, decoders_of
from gateway.answers.text_offsets import TextOffsets
from sluice.checkpoint.vocabulary import Vocabulary
from tests.examples import examples
from tests.fakes.tokenizers import TABLES


@cache
def built(kind: str) -> tuple[Tokenizer, Vocabulary, Decoders]:
    tokenizer = TABLES[kind]()
    return tokenizer, Vocabulary(tokenizer), decoders_of(tokenizer)


def token_of(vocabulary: Vocabulary, number: int) -> str:
    return vocabulary.tokenizer.id_to_token(number)


def readable(vocabulary: Vocabulary, number: int) -> bool:
    """Whether the token is text by itself. A byte of SentencePiece is not: an invalid run of them becomes one other
    character for each."""
    if vocabulary.reading.family == "pieces" and isinstance(
        vocabulary.reading.piece(token_of(vocabulary, number)), bytes
    ):
        return False
    try:
        return vocabulary.bytes_of(number).decode() != ""
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", TABLES)
@examples(40)
@given(data=st.data())
def test_streams_and_whole_answers_agree(kind, data):
    tokenizer, vocabulary, decoders = built(kind)
    ids = [
        number
        for number in sorted(tokenizer.get_vocab(with_added_tokens=True).values())
        if readable(vocabulary, number)
    ]
    special = [tokenizer.token_to_id(text) for text in sorted(vocabulary.special)]
    tokens = data.draw(st.lists(st.sampled_from(ids) | st.sampled_from(special or ids), min_size=1, max_size=12))
    keep = data.draw(st.sampled_from([(), tuple(sorted(vocabulary.special))[:1]]))
    omitted = vocabulary.omitted_ids(skip_special_tokens=True, keep=keep)
    decoder, stream, streamed, text = decoders.new(True, keep), TextOffsets(), [], ""
    decoder.follow([next(number for number in ids if number not in special)])
    for number in tokens:
        piece = decoder.feed([number])
        text += piece
        stream.add_text(piece)
        streamed.append(stream.place(vocabulary.bytes_of(number), omitted=number in omitted))
    text += decoder.flush()
    whole = TextOffsets()
    whole.add_text(text)
    offsets = [whole.place(vocabulary.bytes_of(number), omitted=number in omitted) for number in tokens]
    assert streamed == offsets
    for number, offset in zip(tokens, offsets, strict=True):
        if number not in omitted:
            shown = vocabulary.bytes_of(number).decode()
            assert text[offset:].startswith(shown)
