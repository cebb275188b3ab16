"""What the detokenizer makes of a stream's rows."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from detok_service.decoder import Decoders, load_decoders
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import TextStream
from sluice import tiny_model
from sluice.ring.rows import End, Open, TokenLogprob, TokenRow


class Read(NamedTuple):
    tokens: list[int]
    """Those of a resumed stream's caller, too."""
    logprobs: list[TokenLogprob]
    text: str
    end: End


@cache
def decoders() -> Decoders:
    return load_decoders(tiny_model.path() / "tokenizer.json")


def read(opened: Open, sequence: int, rows: Iterable[TokenRow]) -> Read:
    """Up to a stop string; what the engine sent behind it is not looked at."""
    params = opened.text
    stops = StopSearch(StopStrings(params.stop), params.include_stop) if params.stop else None
    stream = TextStream(opened, sequence, ("engine", 1), decoders().new(params.skip_special_tokens), stops, 0.0)
    tokens, logprobs, text = list(opened.resume.get(sequence, ())), [], ""
    while stream.replaying:
        stream.replay(7, 0.0)
    for row in rows:
        if stream.end is not None:
            break
        stream.ingest(row.offset, row.tokens, row.logprobs, row.end)
        stream.advance(0.0)
        _, _, new_tokens, new_logprobs, new_text, _ = stream.row()
        tokens, logprobs, text = tokens + new_tokens, logprobs + new_logprobs, text + new_text
    assert stream.end is not None
    return Read(tokens, logprobs, text + stream.end.held, stream.end)
