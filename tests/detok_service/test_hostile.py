"""Well-formed frames with nonsensical contents."""

import random

import msgspec
from structlog.testing import capture_logs

from detok_service.decoders import load_decoders
from sluice.lanes.inbox import Gap
from sluice.wire.heartbeats import Hello, KeepAlive
from sluice.wire.message import Message
from sluice.wire.requests import Drop, ToDetokenizer
from sluice.wire.rows import TokenLogprob
from tests.detok_service.bench import LENGTH, Bench, batch, opened, row
from tests.fakes.tokenizers import TINY

FRAMES = 3000


def seeds() -> list[Message]:
    logprobs = [TokenLogprob(-1.0, 1, [(5, -1.0)])]
    return [
        Hello("r", "router"),
        KeepAlive("engine", 1),
        Drop(2, 1),
        batch(row(2, 0, [50, 51]), opens=[opened(2, n=2, stop=("ab", "b"), interval=2)]),
        batch(row(2, 2, [52], LENGTH, logprobs=logprobs), row(2, 0, [60], sequence=1)),
        batch(row(3, 3, [9], attempt=2), opens=[opened(3, n=3, attempt=2, resume={0: [7, 8, 9]}, ended=[1])]),
    ]


ODD = [0, 1, 2, -1, 7, 1000, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), "", "\x00", "router", 0.5, None, [], {}]


def mutated(value, random: random.Random):
    """The message with one leaf value replaced."""
    if isinstance(value, list) and value:
        index = random.randrange(len(value))
        return [*value[:index], mutated(value[index], random), *value[index + 1 :]]
    if isinstance(value, dict) and value:
        key = random.choice([*value])
        if random.random() < 0.3 and isinstance(key, int):
            return {mutated(key, random): value[key]}
        return value | {key: mutated(value[key], random)}
    same_type = [odd_value for odd_value in ODD if type(odd_value) is type(value)]
    return random.choice(same_type if same_type and random.random() < 0.8 else ODD)


def test_mutated_frames_do_not_affect_other_streams():
    """One valid stream continues throughout; streams opened by mutated frames end with their engines."""
    shuffle = random.Random(4)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToDetokenizer)
    plain = [msgspec.msgpack.decode(encoder.encode(message), strict=False) for message in seeds()]
    decoders = load_decoders(TINY / "tokenizer.json")
    bench = Bench(max_streams=5000, new=lambda: decoders.new(True))
    bench.handle(Hello("r", "good"), batch(opens=[opened(1 << 50, router="good")], engine="good"))
    sent = 0
    with capture_logs():
        for step in range(FRAMES):
            try:
                message = decoder.decode(encoder.encode(mutated(shuffle.choice(plain), shuffle)))
            except (msgspec.MsgspecError, ValueError, TypeError):
                continue
            gap = [Gap(step, shuffle.getrandbits(64))] if shuffle.random() < 0.1 else []
            bench.handle(*gap, message, Hello("r", "good"), batch(row(1 << 50, sent, [ord("a") % 64]), engine="good"))
            sent += 1
            bench.heartbeat(0.001)
        assert sent > FRAMES // 10
        bench.handle(batch(row(1 << 50, sent, [], LENGTH), engine="good"))
        for _ in range(1300):
            bench.handle(Hello("r", "good"), KeepAlive("good", 1))
            bench.heartbeat()
    valid_rows = [text_row for text_row in bench.lanes["good"].rows() if text_row.request == 1 << 50]
    assert sum(len(text_row.tokens) for text_row in valid_rows) == sent
    assert [text_row.end for text_row in valid_rows if text_row.end is not None] == [LENGTH]
    assert (bench.service.streams, bench.service.waiting) == (0, 0)
