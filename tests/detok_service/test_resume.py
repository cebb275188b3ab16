"""A stream that is resumed after n tokens shows the same text as the original would have."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import MAX_TEXTLESS, TextStream
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.params import TextParams
from sluice.wire.rows import End, Open, Times, TokenLogprob
from tests.detok_service.test_decoders import KINDS, built, ids_of
from tests.detok_service.test_stream import Words

TIMES = Times(1.0, 2.0, 3.0)
BY_TOKEN = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP_TOKEN]
ALONE = [FinishReason.TIME_LIMIT, FinishReason.ABORTED, FinishReason.ERROR]
SIZES = st.lists(st.integers(1, 5), max_size=12)


class Shown:
    """What a caller has received of a stream: all rows joined, each checked on arrival."""

    def __init__(self):
        self.tokens, self.logprobs, self.text, self.end = [], [], "", None

    def add(self, row):
        _, offset, tokens, logprobs, text, end = row
        assert self.end is None, "a row after the terminal"
        assert offset == len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        self.text += text
        if end is not None:
            self.end = (end.reason, end.stop_token, end.stop_string, end.held)


def new(decoder, params, resumed=()):
    search = StopSearch(StopStrings(params.stop), params.include_stop) if params.stop else None
    opened = Open(7, 1, 1, params, "router", 3, 0, resume={0: list(resumed)} if resumed else {})
    return TextStream(opened, 0, ("engine", 5), decoder, search, 0.0)


def replay(stream, slices=(3,)):
    for count in itertools.cycle(slices):
        if not stream.replaying:
            return
        stream.replay(count, 0.0)


def feed(stream, shown, tokens, sizes, end, rows=1 << 30):
    """Send the tokens that the caller lacks in rows of these sizes, until `rows` rows have been returned."""
    start = len(shown.tokens)
    cuts = [*itertools.accumulate(itertools.chain([start], sizes, itertools.repeat(1, len(tokens))))]
    spans = [
        (start_offset, min(end_offset, len(tokens)))
        for start_offset, end_offset in itertools.pairwise(cuts)
        if start_offset < len(tokens)
    ]
    if not spans or end.reason in ALONE:
        spans.append((len(tokens), len(tokens)))
    for start_offset, end_offset in spans:
        if stream.end is None:
            part = tokens[start_offset:end_offset]
            logprobs = [TokenLogprob(-float(i), 1, []) for i in range(start_offset, end_offset)]
            stream.ingest(start_offset, list(part), logprobs, end if (start_offset, end_offset) == spans[-1] else None)
        if stream.advance(1.0):
            shown.add(stream.row())
            rows -= 1
        if stream.end is not None or rows == 0:
            return


def whole(make_decoder, params, tokens, sizes, end):
    shown = Shown()
    feed(new(make_decoder(), params), shown, tokens, sizes, end)
    return shown


def resumed_often(make_decoder, params, tokens, sizes, end, rows):
    """A stream that is interrupted after each of these numbers of rows, and resumed."""
    shown = Shown()
    for count in rows:
        stream = new(make_decoder(), params, shown.tokens)
        replay(stream)
        if stream.end is not None:
            shown.add(stream.row())
        else:
            feed(stream, shown, tokens, sizes, end, count)
        if shown.end is not None:
            return shown
    stream = new(make_decoder(), params, shown.tokens)
    replay(stream, (1, 4))
    feed(stream, shown, tokens, sizes, end)
    return shown


def at_end(shown):
    """Tokens, logprobs and text that a caller has received if only the end is missing."""
    return [*shown.tokens], [*shown.logprobs], shown.text


def params_for(text):
    """Parameters whose stop strings occur in the text."""
    position = st.integers(0, max(0, len(text) - 1))
    inside = st.builds(lambda start, size: text[start : start + size], position, st.integers(1, 4))
    stops = st.lists(st.one_of(inside, st.text("ab�e", min_size=1, max_size=3)), max_size=3)
    return st.builds(
        TextParams,
        stop=stops.map(lambda stop_strings: tuple(stop for stop in stop_strings if stop)),
        include_stop=st.booleans(),
        min_tokens=st.integers(0, 20),
        skip_special_tokens=st.booleans(),
        interval=st.integers(0, 4),
    )


def ends():
    return st.sampled_from(BY_TOKEN + ALONE).map(lambda reason: End(reason, TIMES, stop_token=1))


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumed_at_any_point_is_the_same_stream(kind):
    tokenizer, decoders = built(kind)

    @given(st.data(), ids_of(kind), ends(), SIZES, SIZES, st.lists(st.integers(1, 4), max_size=6))
    def run(data, tokens, end, sizes, other_sizes, rows):
        params = data.draw(params_for(tokenizer.decode(tokens, skip_special_tokens=False)))

        def make():
            return decoders.new(params.skip_special_tokens)

        expected = whole(make, params, tokens, sizes, end)
        resumed = resumed_often(make, params, tokens, other_sizes, end, rows)
        assert vars(resumed) == vars(expected)

    run()


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_shown_after_n_tokens_depends_only_on_these(kind):
    """A caller with n tokens has a fixed text; a stream resumed there shows the rest of it."""
    tokenizer, decoders = built(kind)

    @given(st.data(), ids_of(kind), ends(), SIZES, st.integers(0, 40))
    def run(data, tokens, end, sizes, count):
        params = data.draw(params_for(tokenizer.decode(tokens, skip_special_tokens=False)))

        def make():
            return decoders.new(params.skip_special_tokens)

        expected = whole(make, params, tokens, sizes, end)
        count = min(count, len(expected.tokens))
        shown = Shown()
        if count == len(expected.tokens) and end.reason in BY_TOKEN:
            shown.tokens, shown.logprobs, shown.text = at_end(expected)
        else:
            feed(new(make(), params), shown, expected.tokens[:count], [1 << 20], End(FinishReason.ERROR, TIMES))
            assert expected.text.startswith(shown.text)
            if count == len(expected.tokens) and expected.end[0] in ALONE:
                assert shown.text == expected.text
            if shown.end[0] is FinishReason.ERROR:
                shown.end = None
        if shown.end is None:
            stream = new(make(), params, shown.tokens)
            replay(stream)
            if stream.end is not None:
                shown.add(stream.row())
            else:
                feed(stream, shown, tokens, sizes, end)
        assert vars(shown) == vars(expected)

    run()


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=12), st.text("ab", max_size=3), SIZES, SIZES, st.data())
@example(["a", "a"], "", [], [], None)
def test_text_is_held_back_across_row_boundaries(texts, rest, sizes, other_sizes, data):
    params = TextParams(stop=("ab", "aabb"), min_tokens=2) if data is None else data.draw(params_for("".join(texts)))
    tokens = list(range(len(texts)))
    end = End(FinishReason.LENGTH, TIMES, stop_token=1)
    expected = whole(lambda: Words(texts, rest), params, tokens, sizes, end)
    for count in range(1, 4):
        resumed = resumed_often(lambda: Words(texts, rest), params, tokens, other_sizes, end, [count] * len(tokens))
        assert vars(resumed) == vars(expected)


def test_a_long_run_of_tokens_without_text_can_be_resumed():
    """A row without text is sent every MAX_TEXTLESS tokens; the text is sent later, once."""
    _, decoders = built("sentencepiece")
    tokenizer, _ = built("sentencepiece")
    smile = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    tokens = smile * MAX_TEXTLESS + [tokenizer.token_to_id("e")]
    end = End(FinishReason.LENGTH, TIMES)
    for rows in (1, 2, 3):
        resumed = resumed_often(lambda: decoders.new(True), TextParams(), tokens, [1] * 400, end, [rows] * 9)
        assert (resumed.text, resumed.tokens) == ("🙂" * MAX_TEXTLESS + "e", tokens)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_within_the_resumed_tokens_ends_the_stream_immediately(include):
    stream = new(Words(["a", "b.", "c", "d"]), TextParams(stop=("b.",), include_stop=include), [0, 1, 2])
    replay(stream)
    assert stream.end.reason is FinishReason.STOP_STRING
    assert stream.advance(1.0)
    assert stream.row()[1:5] == (3, [], [], "")
    assert stream.end.stop_string == "b."


def test_rows_queued_behind_a_replayed_stop_string_are_cut():
    stream = new(Words(["a", "b.", "c", "d"]), TextParams(stop=("b.", "c")), [0, 1, 2])
    stream.ingest(3, [3], [TokenLogprob(0.0, 1, [])], End(FinishReason.LENGTH, TIMES))
    replay(stream)
    assert stream.advance(1.0)
    assert stream.row() == ((7, 1, 0), 3, [], [], "", End(FinishReason.STOP_STRING, TIMES, stop_string="b."))


@pytest.mark.parametrize("slices", [1, 2, 100])
def test_min_tokens_counts_resumed_tokens(slices):
    for count, ends_stream in [(3, False), (4, True), (5, True)]:
        stream = new(Words(["."] * 9), TextParams(stop=(".",), min_tokens=4), range(count))
        replay(stream, (slices,))
        assert (stream.end is not None) == (count > 4)
        if stream.end is None:
            stream.ingest(count, [8], [], None)
        assert stream.advance(1.0)
        assert stream.row()[1:5] == ((count, [], [], "") if ends_stream else (3, [8], [], ""))
        assert stream.end.stop_string == "."


def test_a_stop_string_with_the_last_resumed_token_ends_with_the_next_row():
    """Until then it is unknown whether that token is a hidden stop token, which cannot complete a stop string."""
    for tokens, end, expected in [
        ([2], None, (FinishReason.STOP_STRING, "b.")),
        ([], End(FinishReason.STOP_TOKEN, TIMES, stop_token=1), (FinishReason.STOP_TOKEN, None)),
        ([], End(FinishReason.LENGTH, TIMES), (FinishReason.STOP_STRING, "b.")),
        ([], End(FinishReason.ABORTED, TIMES), (FinishReason.STOP_STRING, "b.")),
    ]:
        stream = new(Words(["a", "b.", "c"]), TextParams(stop=("b.",)), [0, 1])
        replay(stream)
        assert not stream.advance(1.0)
        stream.ingest(2, list(tokens), [], end)
        assert stream.advance(1.0)
        _, offset, tokens_sent, _, text, last = stream.row()
        assert (offset, tokens_sent, text) == (2, [], "")
        assert (last.reason, last.stop_string) == expected


@pytest.mark.parametrize("tokens", [[], [2], [2, 2]])
@pytest.mark.parametrize(
    "end",
    [
        End(FinishReason.ABORTED, TIMES),
        End(FinishReason.TIME_LIMIT, TIMES),
        End(FinishReason.EOS, TIMES, by_guide=True),
    ],
)
def test_text_released_by_an_end_does_not_belong_to_its_tokens(end, tokens):
    """A caller that has these tokens but not the end resumes after the text without the released part."""
    stream = new(Words(["a", "st", "b"], "?"), TextParams(stop=("stop",)))
    stream.ingest(0, [*tokens, 0, 1], [], None)
    stream.ingest(len(tokens) + 2, [], [], end)
    assert stream.advance(1.0)
    assert stream.row()[1:5] == (0, [*tokens, 0, 1], [], "b" * len(tokens) + "a")
    assert stream.end.held == "st?"


def test_held_text_is_shown_at_an_end_without_a_token():
    for end, held_text in [
        (End(FinishReason.ABORTED, TIMES), "st"),
        (End(FinishReason.TIME_LIMIT, TIMES), "st"),
        (End(FinishReason.ERROR, TIMES), ""),
        (End(FinishReason.EOS, TIMES, by_guide=True), "st"),
        # The caller has the last token's row, and this text with it.
        (End(FinishReason.LENGTH, TIMES), ""),
        (End(FinishReason.EOS, TIMES), ""),
    ]:
        stream = new(Words(["a", "st"]), TextParams(stop=("stop",)), [0, 1])
        replay(stream)
        stream.ingest(2, [], [], end)
        assert stream.advance(1.0)
        assert (stream.row()[4], stream.end.held) == ("", held_text)


@pytest.mark.parametrize("stop", [("stop",), ()])
def test_a_stream_that_is_handed_over_continues_as_if_it_had_not_ended(stop):
    """Nothing that is held back is shown at the end of the attempt, nor searched for a stop string."""
    first = new(Words(["s", "t", "op", "x"], "stop"), TextParams(stop=stop))
    first.ingest(0, [0], [], End(FinishReason.HANDED_OVER, TIMES))
    assert first.advance(1.0)
    shown = "" if stop else "s"
    assert first.row()[1:5] == (0, [0], [], shown)
    assert (first.end.reason, first.end.held, first.complete) == (FinishReason.HANDED_OVER, "", True)
    second = new(Words(["s", "t", "op", "x"], "stop"), TextParams(stop=stop), [0])
    replay(second)
    second.ingest(1, [1, 3], [], None)
    assert second.advance(1.0)
    assert shown + second.row()[4] == "stx"


def test_a_stop_string_in_the_only_token_ends_the_stream_that_would_be_handed_over():
    stream = new(Words(["stop"]), TextParams(stop=("stop",)))
    stream.ingest(0, [0], [], End(FinishReason.HANDED_OVER, TIMES))
    assert stream.advance(1.0)
    assert (stream.end.reason, stream.end.times) == (FinishReason.STOP_STRING, TIMES)


def test_missing_rows_and_a_failure_right_after_the_resumed_tokens():
    stream = new(Words(list("abcd")), TextParams(), [0, 1])
    replay(stream)
    stream.ingest(3, [3], [], None)
    assert stream.advance(1.0)
    assert stream.row()[1:5] == (2, [], [], "")
    assert stream.end.fault.error_code is ErrorCode.ROWS_LOST

    stream = new(Words(list("abcd")), TextParams(), [0, 1, 2])
    stream.ingest(3, [3], [], None)
    stream.fail(ErrorCode.ENGINE_LOST, "gone")
    assert stream.row()[1:5] == (3, [], [], "")
