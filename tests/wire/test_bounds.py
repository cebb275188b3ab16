"""Messages with invalid values are refused when they are decoded."""

import math

import msgspec
import pytest

from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Hello
from sluice.wire.params import MAX_STOP_CHARS, MAX_WORDS_TOKENS, SamplingParams, Speculation, StopParams, TextParams
from sluice.wire.requests import Cancel, Extras, Submit, ToDetokenizer, ToEngine, ToRouter
from sluice.wire.rows import MAX_TEXT_ROWS, End, Open, TextRow, Times, TokenBatch, TokenLogprob, TokenRow
from sluice.wire.stats import StepStats
from tests.fakes.rows import text_batch

SUBMIT = Submit(
    request=1,
    attempt=0,
    engine_epoch=2**64 - 1,
    name="r",
    prompt=[1, 2],
    n=2,
    sampling=SamplingParams(seed=2**64 - 1),
    stopping=StopParams(max_tokens=4),
    text=TextParams(),
    priority=2,
    salt="",
    time_limit=None,
    detokenizer="ipc:///d",
    router="ipc:///r",
    resume={1: [5]},
    ended=[0],
)
OPEN = Open(1, 0, 1, TextParams(), "ipc:///r", 1, 0)
ENGINE_HEARTBEAT = EngineHeartbeat("e", 1, "ipc:///e", "f", 100, False, StepStats())
HEARTBEAT = DetokenizerHeartbeat("d", 1, "ipc:///d", False, 1, 1, 1.0, missed={2**64 - 1: 2**63 - 1})
TIMES = Times(0.0, 0.0, 0.0)


def decode(message, kind):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def changed(message, **fields):
    return msgspec.structs.replace(message, **fields)


def batch(row: TokenRow, opens: list[Open] | None = None) -> TokenBatch:
    return TokenBatch.of("e", 1, opens or [], [row])


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (SUBMIT, ToEngine),
        (changed(SUBMIT, extras=Extras(prompt_logprobs=2, speculation=Speculation(3, (5,)))), ToEngine),
        (HEARTBEAT, ToRouter),
        (
            batch(TokenRow(1, 0, 127, 0, [1], [TokenLogprob(-math.inf, 1, [(0, math.nan)])], None), [OPEN]),
            ToDetokenizer,
        ),
    ],
)
def test_valid_messages_are_decoded(message, kind):
    assert repr(decode(message, kind)) == repr(message)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        *((changed(SUBMIT, n=n), ToEngine) for n in (0, -1, 129, 2**60)),
        *((changed(SUBMIT, prompt=[token]), ToEngine) for token in (-1, 2**32)),
        *((changed(SUBMIT, time_limit=limit), ToEngine) for limit in (math.nan, math.inf, -1.0)),
        *((changed(SUBMIT, resume=resume), ToEngine) for resume in ({128: []}, {-1: []}, {0: [-1]})),
        (changed(SUBMIT, attempt=-1), ToEngine),
        (changed(SUBMIT, detokenizer="x" * 1025), ToEngine),
        *((changed(SUBMIT, sampling=SamplingParams(temperature=t)), ToEngine) for t in (math.nan, math.inf, -1.0)),
        *((changed(SUBMIT, sampling=SamplingParams(logprobs=n)), ToEngine) for n in (-1, 21, 2**60)),
        (changed(SUBMIT, sampling=SamplingParams(logit_bias=((-1, 1.0),))), ToEngine),
        (changed(SUBMIT, sampling=SamplingParams(repetition_penalty=0.0)), ToEngine),
        (changed(SUBMIT, sampling=SamplingParams(no_repeat_ngram_size=17)), ToEngine),
        (changed(SUBMIT, sampling=SamplingParams(logits_processors=("p",) * 17)), ToEngine),
        (changed(SUBMIT, stopping=StopParams(max_tokens=2**60)), ToEngine),
        (Cancel(1, 0, 1, 2**60), ToEngine),
        (Hello("r", "x" * 1025), ToEngine),
        (Hello("r", "ipc:///r", -1), ToEngine),
        (batch(TokenRow(1, 0, 0, 0, [], [], None), [changed(OPEN, n=2**60)]), ToDetokenizer),
        (batch(TokenRow(1, 0, -1, 0, [], [], None)), ToDetokenizer),
        (batch(TokenRow(1, 0, 0, -5, [1], [], None)), ToDetokenizer),
        (batch(TokenRow(1, 0, 0, 0, [-1], [], None)), ToDetokenizer),
        (batch(TokenRow(1, 0, 0, 0, [], [], End(FinishReason.EOS, changed(TIMES, queue=math.nan)))), ToDetokenizer),
        (changed(HEARTBEAT, streams=-1), ToRouter),
        (changed(HEARTBEAT, tokens_per_second=math.nan), ToRouter),
        (changed(HEARTBEAT, missed=dict.fromkeys(range(10000), 1)), ToRouter),
        (changed(ENGINE_HEARTBEAT, max_batch_size=-1), ToRouter),
        *((changed(ENGINE_HEARTBEAT, stats=StepStats(time=moment)), ToRouter) for moment in (-1.0, math.nan, 1e12)),
        *((changed(ENGINE_HEARTBEAT, stats=StepStats(max_requests=n)), ToRouter) for n in (-1, 2**32)),
        (changed(ENGINE_HEARTBEAT, cut_off=["x"] * 5000), ToRouter),
        (text_batch("d", [], [TextRow(1, 0, 0, 0, [], [], "", None)] * (MAX_TEXT_ROWS + 1)), ToRouter),
    ],
)
def test_invalid_messages_are_refused(message, kind):
    with pytest.raises(msgspec.ValidationError):
        decode(message, kind)


def test_stop_strings_are_bounded_together():
    half = "x" * (MAX_STOP_CHARS // 2)
    assert TextParams(stop=(half, half)).stop
    with pytest.raises(ValueError, match="stop strings"):
        TextParams(stop=(half, half, "x"))
    params = msgspec.to_builtins(TextParams()) | {"stop": [half, half, "x"]}
    with pytest.raises(msgspec.ValidationError):
        decode(params, TextParams)


def test_bad_words_are_bounded_together():
    words = tuple((i, 1) for i in range(MAX_WORDS_TOKENS // 2))
    assert SamplingParams(bad_words=words).bad_words
    params = msgspec.to_builtins(SamplingParams()) | {"bad_words": [*words, (1, 2)]}
    with pytest.raises(msgspec.ValidationError, match="bad_words may have at most"):
        decode(params, SamplingParams)
