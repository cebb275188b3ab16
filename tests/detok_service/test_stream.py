import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detok_service.decoders import decoders_of
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import MAX_TEXTLESS, TextStream
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.params import TextParams
from sluice.wire.rows import End, Open, TextRow, Times, TokenLogprob
from tests.detok_service.test_stops import oracle
from tests.fakes.tokenizers import byte_char, byte_level, sentencepiece

TIMES = Times(1.0, 2.0, 3.0)
LENGTH = End(FinishReason.LENGTH, TIMES)
TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}
DECODERS = {kind: decoders_of(tokenizer) for kind, tokenizer in TOKENIZERS.items()}


class Words:
    """A decoder whose tokens are indices into a list of texts."""

    def __init__(self, texts, rest=""):
        self.texts, self.rest = texts, rest

    def feed(self, tokens):
        return "".join(self.texts[token] for token in tokens)

    def flush(self):
        return self.rest


def tokenizer_ids(kind, text):
    """Ids of a text with special tokens; all other characters are written byte by byte."""
    tokenizer = TOKENIZERS[kind]
    pattern = re.compile("|".join(map(re.escape, DECODERS[kind].special)))
    write = {"byte level": byte_char, "sentencepiece": "<0x{:02X}>".format}[kind]
    at = 0
    while at < len(text):
        found = pattern.match(text, at)
        written = [found[0]] if found else [write(byte) for byte in text[at].encode()]
        yield from map(tokenizer.token_to_id, written)
        at = found.end() if found else at + 1


def make(decoder, now=0.0, queue=0.0, **text):
    params = TextParams(**text)
    search = StopSearch(StopStrings(params.stop), params.include_stop) if params.stop else None
    return TextStream(Open(7, 1, 1, params, "router", 3, 0, queue), 0, ("engine", 5), decoder, search, now)


def row_of(stream):
    key, *rest = stream.row()
    return TextRow(*key, *rest)


def logprobs(tokens, start=0):
    return [TokenLogprob(-float(start + i), 1, [(token, -1.0)]) for i, token in enumerate(tokens)]


def cut(tokens, sizes):
    rows, start = [], 0
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if start >= len(tokens):
            return rows
        rows.append((start, tokens[start : start + size]))
        start += size
    return rows


def drive(stream, tokens, sizes=(), end=LENGTH, together=False):
    """All rows of the stream. `together`: the end is in the row of the last tokens, not in a separate row."""
    sent_rows = []
    rows = cut(tokens, sizes)
    for position, (offset, row) in enumerate(rows or [(0, [])]):
        last = end if position >= len(rows) - 1 else None
        stream.ingest(offset, list(row), logprobs(row, offset), last)
        if not together and stream.advance(1.0):
            sent_rows.append(row_of(stream))
        if stream.end is not None:
            return sent_rows
    if together and stream.advance(1.0):
        sent_rows.append(row_of(stream))
    return sent_rows


def joined(rows):
    """(tokens, logprobs, text, end), after checking the invariants of any stream's rows."""
    assert [row.end is not None for row in rows] == [False] * (len(rows) - 1) + [True]
    tokens = [token for row in rows for token in row.tokens]
    assert [row.offset for row in rows] == [*itertools.accumulate([0] + [len(row.tokens) for row in rows[:-1]])]
    return (
        tokens,
        [logprob for row in rows for logprob in row.logprobs],
        "".join(row.text for row in rows),
        rows[-1].end,
    )


WORDS = st.lists(st.text("ab", max_size=4), min_size=1, max_size=12)
SIZES = st.lists(st.integers(1, 5), max_size=12)


@given(
    WORDS,
    st.text("ab", max_size=3),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    SIZES,
    st.integers(0, 8),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_against_the_oracle(texts, rest, stops, sizes, min_tokens, interval, include, together):
    tokens = list(range(len(texts)))
    stream = make(Words(texts, rest), stop=tuple(stops), min_tokens=min_tokens, interval=interval, include_stop=include)
    text, count, stop = oracle(texts, rest, stops, min_tokens, include)
    rows = drive(stream, tokens, sizes, together=together)
    result_tokens, result_logprobs, result_text, end = joined(rows)
    assert (result_tokens, result_text) == (tokens[:count], text)
    assert result_logprobs == logprobs(tokens)[:count]
    assert (end.reason, end.stop_string) == (FinishReason.STOP_STRING if stop else FinishReason.LENGTH, stop)
    assert all(len(row.tokens) >= interval for row in rows[:-1])
    assert interval or len(rows) == 1


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_whole_stream_equals_decode(kind):
    tokenizer = TOKENIZERS[kind]

    @given(st.lists(st.integers(0, tokenizer.get_vocab_size() + 40), max_size=40), SIZES, st.booleans())
    def run(tokens, sizes, skip):
        stream = make(DECODERS[kind].new(skip), skip_special_tokens=skip)
        result_tokens, _, text, end = joined(drive(stream, tokens, sizes))
        assert (result_tokens, text, end) == (tokens, tokenizer.decode(tokens, skip_special_tokens=skip), LENGTH)

    run()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_in_a_real_text_at_every_row_cut(kind):
    tokenizer = TOKENIZERS[kind]
    unit = [*tokenizer.encode("e🙂日本 e", add_special_tokens=False).ids] or [1]
    text = tokenizer.decode(unit * 3)
    for start, stop_end in itertools.combinations(range(len(text) + 1), 2):
        stop = text[start:stop_end]
        for size in (1, 2, 5, 100):
            stream = make(DECODERS[kind].new(True), stop=(stop,))
            _, _, shown, end = joined(drive(stream, unit * 3, itertools.repeat(size)))
            assert (shown, end.stop_string) == (text[: text.index(stop)], stop)


def test_tokens_and_logprobs_are_cut_within_a_row():
    stream = make(Words(["a", "b st", "op c", "d"]), stop=("stop",))
    stream.ingest(0, [0, 1, 2, 3], logprobs([0, 1, 2, 3]), LENGTH)
    assert stream.advance(1.0)
    row = row_of(stream)
    assert (row.tokens, row.text, row.logprobs) == ([0, 1, 2], "ab ", logprobs([0, 1, 2]))
    assert row.end == End(FinishReason.STOP_STRING, TIMES, stop_string="stop")


def test_a_stop_completed_by_the_flush():
    tokenizer, decoders = TOKENIZERS["byte level"], DECODERS["byte level"]
    tokens = [*tokenizer.encode("x🙂").ids][:-1]
    assert tokenizer.decode(tokens) == "x�"
    stream = make(decoders.new(True), stop=("x�",))
    assert joined(drive(stream, tokens))[2:] == ("", End(FinishReason.STOP_STRING, TIMES, stop_string="x�"))
    stream = make(decoders.new(True), stop=("x�",), min_tokens=len(tokens) + 1)
    assert joined(drive(stream, tokens))[2:] == ("x�", LENGTH)


def test_held_text_is_shown_at_the_end():
    stream = make(Words(["a", "st"]), stop=("stop",))
    stream.ingest(0, [0, 1], [], None)
    assert stream.advance(1.0)
    assert row_of(stream).text == "a"
    stream.ingest(2, [], [], LENGTH)
    assert stream.advance(1.0)
    assert row_of(stream)[3:8] == (2, [], [], "st", LENGTH)


def test_after_an_error_nothing_is_flushed():
    """A resubmitted request continues after the text that depends only on the tokens."""
    failed = End(FinishReason.ERROR, TIMES)
    assert joined(drive(make(Words(["a", "st"], "�"), stop=("stop",)), [0, 1], end=failed))[2:] == ("a", failed)
    assert joined(drive(make(Words(["a"], "�")), [0], end=failed))[2:] == ("a", failed)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a.")])
@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_the_stop_token_is_shown_only_with_include_stop(include, text, stop):
    end = End(FinishReason.STOP_TOKEN, TIMES, stop_token=1)
    for sizes in ([1, 1], [2]):
        stream = make(Words(["a", "."]), include_stop=include, stop=stop)
        assert joined(drive(stream, [0, 1], sizes, end)) == ([0, 1], logprobs([0, 1]), text, end)


def test_a_hidden_stop_token_cannot_complete_a_stop_string():
    end = End(FinishReason.STOP_TOKEN, TIMES, stop_token=1)
    assert joined(drive(make(Words(["a", "."]), stop=("a.",)), [0, 1], end=end))[2:] == ("a", end)


@pytest.mark.parametrize("token", ["<|im_end|>", "<tool>"], ids=["special", "not special"])
@pytest.mark.parametrize(("skip", "shown"), [(True, False), (False, True)])
def test_the_end_token_has_no_text_unless_special_tokens_are_asked_for(token, skip, shown):
    tokenizer = TOKENIZERS["byte level"]
    end = End(FinishReason.EOS, TIMES, stop_token=tokenizer.token_to_id(token))
    tokens = tokenizer.encode(f"hi{token}").ids
    stream = make(DECODERS["byte level"].new(skip), skip_special_tokens=skip)
    assert joined(drive(stream, tokens, end=end))[2:] == (f"hi{token}" if shown else "hi", end)


@pytest.mark.parametrize(
    ("text", "stop", "include", "shown"),
    [
        ("é<|im_start|>x", "<|im_start|>", False, "é"),
        ("é<|im_start|>x", "<|im_start|>", True, "é<|im_start|>"),
        ("a\n<|im_start|>user", "\n<|im_start|>us", False, "a"),
        ("a\n<|im_start|>b<|im_start|>c", "<|im_start|>c", True, "a\nb<|im_start|>c"),
        ("a\n<|im_start|>b", "\n<|im_start|>c", False, "a\nb"),
    ],
)
def test_a_stop_string_with_the_text_of_a_special_token(text, stop, include, shown):
    for kind in TOKENIZERS:
        special = {"byte level": "<|im_start|>", "sentencepiece": "</s>"}[kind]
        text, stop, shown = (part.replace("<|im_start|>", special) for part in (text, stop, shown))
        tokens = [*tokenizer_ids(kind, text)]
        for sizes in ([], [100]):
            params = TextParams(stop=(stop,), include_stop=include)
            decoders = DECODERS[kind]
            stops = StopSearch(StopStrings(params.stop, decoders.omitted_in_stops(params)), include)
            opened = Open(7, 1, 1, params, "router", 3, 0)
            stream = TextStream(opened, 0, ("engine", 5), decoders.new(True), stops, 0.0)
            _, _, result, end = joined(drive(stream, tokens, sizes))
            assert (result, end.stop_string) == (shown, stop if end.reason is FinishReason.STOP_STRING else None)


def test_seen_tokens_are_dropped():
    stream = make(Words(list("abcdef")))
    for offset, tokens in [(0, [0, 1]), (0, [0, 1]), (1, [1, 2, 3]), (2, [2]), (4, [4])]:
        stream.ingest(offset, tokens, logprobs(tokens, offset), None)
    stream.ingest(3, [3, 4, 5], logprobs([3, 4, 5], 3), LENGTH)
    assert stream.advance(1.0)
    assert row_of(stream)[3:8] == (0, [*range(6)], logprobs(range(6)), "abcdef", LENGTH)


def test_missing_rows_end_the_stream_after_the_rows_before_them():
    stream = make(Words(list("abcdef")))
    stream.ingest(0, [0, 1], [], None)
    stream.ingest(3, [3], [], None)
    stream.ingest(4, [4], [], LENGTH)
    assert stream.complete
    assert stream.advance(1.0)
    row = row_of(stream)
    assert (row.tokens, row.text, row.end.reason) == ([0, 1], "ab", FinishReason.ERROR)
    assert row.end.fault.error_code is ErrorCode.ROWS_LOST
    assert "2 to 2" in row.end.fault.message


@pytest.mark.parametrize("with_logprobs", [0, 1])
def test_mixing_rows_with_and_without_logprobs_is_an_error(with_logprobs):
    stream = make(Words(list("abc")))
    for offset in range(2):
        stream.ingest(offset, [offset], logprobs([offset], offset) if offset == with_logprobs else [], None)
    stream.ingest(2, [2], [], LENGTH)
    assert stream.advance(1.0)
    row = row_of(stream)
    assert (row.tokens, row.text, row.end.fault.error_code) == ([0], "a", ErrorCode.ROWS_LOST)
    assert len(row.logprobs) in (0, 1)


def test_tokens_without_text_are_joined_up_to_a_limit():
    stream = make(Words(["", "a"]))
    due = []
    for offset in range(2 * MAX_TEXTLESS):
        stream.ingest(offset, [0], [], None)
        due.append(stream.advance(1.0))
        if due[-1]:
            assert len(row_of(stream).tokens) == MAX_TEXTLESS
    assert sum(due) == 2
    stream.ingest(2 * MAX_TEXTLESS, [0], [], None)
    assert not stream.advance(1.0)
    stream.ingest(2 * MAX_TEXTLESS + 1, [1], [], None)
    assert stream.advance(1.0)
    assert row_of(stream).tokens == [0, 1]


def test_rows_that_were_not_sent_are_joined():
    stream = make(Words(list("abc")))
    for offset in range(3):
        stream.ingest(offset, [offset], logprobs([offset], offset), LENGTH if offset == 2 else None)
        assert stream.advance(1.0)
    assert row_of(stream)[3:8] == (0, [0, 1, 2], logprobs([0, 1, 2]), "abc", LENGTH)


def test_times_of_a_stop_string():
    """The engine reports the queue time. The detokenizer's clock measures the others, from Open and first token."""
    stream = make(Words(["a", "b."]), now=10.0, queue=4.0, stop=(".",))
    stream.ingest(0, [0], [], None)
    stream.advance(12.0)
    stream.ingest(1, [1], [], None)
    stream.advance(17.0)
    assert stream.end.times == Times(4.0, 2.0, 5.0)


def test_failed_streams_send_what_was_decoded():
    stream = make(Words(["a", "b"]), interval=0)
    stream.ingest(0, [0], [], None)
    assert not stream.advance(1.0)
    stream.ingest(1, [1], [], None)
    stream.fail(ErrorCode.DRAINING, "draining")
    row = row_of(stream)
    assert (row.tokens, row.text, row.end.fault.error_code) == ([0], "a", ErrorCode.DRAINING)
