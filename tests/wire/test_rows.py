"""Rows survive conversion to columns and bytes. Columns of different lengths are refused."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.message import Message
from sluice.wire.requests import ToDetokenizer
from sluice.wire.rows import End, TextBatch, TextRow, Times, TokenBatch, TokenLogprob, TokenRow
from tests.fakes.rows import rows_of, text_batch

numbers = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False)
logprob = st.builds(TokenLogprob, floats, st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), floats), max_size=2))
ends = st.none() | st.builds(
    End,
    st.sampled_from(FinishReason),
    st.just(Times(0.5, 1.0, 2.0)),
    st.none() | st.integers(0, 9),
    st.none() | st.text(max_size=3),
    st.none() | st.builds(Fault, st.sampled_from([code.name for code in ErrorCode]), st.text(max_size=5)),
)


@st.composite
def token_rows(draw):
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), max_size=4))
    with_logprobs = draw(st.booleans())
    logprobs = draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens))) if with_logprobs else []
    return TokenRow(
        draw(numbers), draw(st.integers(0, 9)), draw(st.integers(0, 127)), draw(counts), tokens, logprobs, draw(ends)
    )


def over_the_wire(message: Message, messages) -> Message:
    return msgspec.msgpack.Decoder(messages).decode(msgspec.msgpack.Encoder().encode(message))


@given(st.lists(token_rows(), max_size=6))
def test_token_rows_survive_columns_and_bytes(rows):
    batch = over_the_wire(TokenBatch.of("engine", 7, [], rows), ToDetokenizer)
    assert list(rows_of(batch)) == rows


@given(st.lists(st.tuples(token_rows(), st.text()), max_size=6))
def test_text_rows_survive_columns_and_bytes(rows):
    rows = [
        TextRow(row.request, row.attempt, row.sequence, row.offset, row.tokens, row.logprobs, text, row.end)
        for row, text in rows
    ]
    batch = over_the_wire(text_batch("detok", [], rows), TextBatch)
    assert list(batch.rows()) == rows


def test_infinite_and_undefined_logprobs_can_be_sent():
    row = TokenRow(1, 0, 0, 0, [5], [TokenLogprob(-math.inf, 1, [(3, math.nan)])], None)
    (back,) = rows_of(over_the_wire(TokenBatch.of("e", 1, [], [row]), TokenBatch))
    assert back.logprobs[0].logprob == -math.inf
    assert math.isnan(back.logprobs[0].top[0][1])


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": []},
        {"sequence": [0, 0]},
        {"count": [3]},
        {"count": [-1]},
        {"tokens": [1]},
        {"logprobs": {0: []}},
        {"logprobs": {4: []}},
        {"ends": {1: End(FinishReason.EOS, Times(0, 0, 0))}},
    ],
)
def test_columns_that_disagree_are_refused(change):
    good = TokenBatch.of("e", 1, [], [TokenRow(1, 0, 0, 0, [5, 6], [], None)])
    bad = {name: getattr(good, name) for name in good.__struct_fields__} | change
    frame = msgspec.msgpack.encode(["TokenBatch", *bad.values()])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(ToDetokenizer).decode(frame)
