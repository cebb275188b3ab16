"""python -m bench.detok: µs of CPU per token, of the detokenizer service without sockets and of the decoder alone."""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog
from tokenizers import Tokenizer

from detok_service.decoder import Decoders, load_decoders
from detok_service.service import Detokenizer, Identity
from sluice.ring.heartbeats import Hello, KeepAlive
from sluice.ring.message import Message
from sluice.ring.params import TextParams
from sluice.ring.wire import Open, TokenBatch, TokenRow

FILE = Path(__file__).parents[1] / "sluice" / "tiny_model" / "checkpoint" / "tokenizer.json"
# With min_tokens, stop strings never end a stream: the rest of its tokens would cost nothing.
TEXTS = {"plain": TextParams(), "stop strings": TextParams(stop=("\n\n", "</s>", "def "), min_tokens=1 << 30)}


class Sink:
    """A lane that encodes messages and drops them."""

    open = True

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def ready(self) -> bool:
        return True

    def send(self, message: Message) -> bool:
        self._encoder.encode(message)
        return True

    def close(self, linger: float = 0.0) -> None:
        pass


def frames(tokens: list[int], streams: int, steps: int, row: int, text: TextParams) -> list[bytes]:
    encoder = msgspec.msgpack.Encoder()
    opens = [Open(request, 1, 1, text, "router", 1, 0) for request in range(1 << 62, (1 << 62) + streams)]
    starts = [random.Random(i).randrange(len(tokens)) for i in range(streams)]
    endless = tokens * (2 + steps * row // len(tokens))
    bodies = []
    for step in range(steps):
        at = step * row
        rows = [
            TokenRow(opened.request, 1, 0, at, endless[start + at : start + at + row], [], None)
            for opened, start in zip(opens, starts, strict=True)
        ]
        bodies.append(encoder.encode(TokenBatch.of("engine", 1, opens if step == 0 else [], rows)))
    return bodies


def serve(decoders: Decoders, bodies: list[bytes], joined: int) -> None:
    log: structlog.stdlib.BoundLogger = structlog.get_logger()
    service = Detokenizer(Identity("detok", 1, "detok"), decoders, lambda _: Sink(), 1_000_000, log)
    decoder: msgspec.msgpack.Decoder[Hello | TokenBatch | KeepAlive] = msgspec.msgpack.Decoder(
        Hello | TokenBatch | KeepAlive
    )
    for start in range(0, len(bodies), joined):
        service.handle([decoder.decode(body) for body in bodies[start : start + joined]])


def decode(decoders: Decoders, tokens: list[int], row: int) -> None:
    feed = decoders.new(skip_special_tokens=True).feed
    for start in range(0, len(tokens), row):
        feed(tokens[start : start + row])


def cost(run: Callable[[], None], tokens: int, repeat: int) -> float:
    """Least CPU time of `repeat` runs, in µs per token."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return best / tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("streams", 256), ("steps", 200), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    decoders = load_decoders(FILE)
    tokens = Tokenizer.from_file(str(FILE)).encode(Path(argparse.__file__).read_text(encoding="utf-8")).ids
    print(f"{options.streams} streams, {options.steps} steps, least of {options.repeat}: µs of CPU per token")
    for row in (1, 8):
        spent = cost(partial(decode, decoders, tokens, row), len(tokens), options.repeat)
        print(f"  decoder alone, {row} tokens per row {spent:24.2f}")
    for title, text in TEXTS.items():
        for row, joined in [(1, 1), (1, 16), (8, 1)]:
            bodies = frames(tokens, options.streams, options.steps, row, text)
            spent = cost(
                partial(serve, decoders, bodies, joined), options.streams * options.steps * row, options.repeat
            )
            print(f"  service, {title:12}, {row} tokens per row, {joined:2} steps per drain {spent:6.2f}")


if __name__ == "__main__":
    main()
