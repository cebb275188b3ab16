"""Well-formed frames with nonsensical contents."""

import random

import msgspec
from structlog.testing import capture_logs

from detok_service.decoder import load_decoders
from sluice.ring.heartbeats import Hello, KeepAlive
from sluice.ring.inbox import Gap
from sluice.ring.message import Message
from sluice.ring.rows import TokenLogprob
from sluice.ring.wire import Drop, ToDetokenizer
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
        at = random.randrange(len(value))
        return [*value[:at], mutated(value[at], random), *value[at + 1 :]]
    if isinstance(value, dict) and value:
        key = random.choice([*value])
        if random.random() < 0.3 and isinstance(key, int):
            return {mutated(key, random): value[key]}
        return value | {key: mutated(value[key], random)}
    same = [one for one in ODD if type(one) is type(value)]
    return random.choice(same if same and random.random() < 0.8 else ODD)


def test_mutated_frames_do_not_affect_other_streams():
    """One valid stream continues throughout; streams opened by mutated frames end with their engines."""
    shuffle = random.Random(4)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToDetokenizer)
    plain = [msgspec.msgpack.decode(encoder.encode(message), strict=False) for message in seeds()]
    decoders = load_decoders(TINY / "tokenizer.json")
    bench = Bench(max_streams=5000, new=lambda: decoders.new(True))
    bench.handle(Hello("r", "good"), batch(opens=[opened(1 << 50, router="good")], engine="good"))
    taken = 0
    with capture_logs():
        for step in range(FRAMES):
            try:
                message = decoder.decode(encoder.encode(mutated(shuffle.choice(plain), shuffle)))
            except (msgspec.MsgspecError, ValueError, TypeError):
                continue
            gap = [Gap(step, shuffle.getrandbits(64))] if shuffle.random() < 0.1 else []
            bench.handle(*gap, message, Hello("r", "good"), batch(row(1 << 50, taken, [ord("a") % 64]), engine="good"))
            taken += 1
            bench.heartbeat(0.001)
        assert taken > FRAMES // 10
        bench.handle(batch(row(1 << 50, taken, [], LENGTH), engine="good"))
        for _ in range(1300):
            bench.handle(Hello("r", "good"), KeepAlive("good", 1))
            bench.heartbeat()
    mine = [one for one in bench.lanes["good"].rows() if one.request == 1 << 50]
    assert sum(len(one.tokens) for one in mine) == taken
    assert [one.end for one in mine if one.end is not None] == [LENGTH]
    assert (bench.service.streams, bench.service.waiting) == (0, 0)
