"""Reads a stream's rows through the real detokenizer code."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from detok_service.decoders import Decoders, load_decoders
from detok_service.stops import StopSearch, StopStrings
from detok_service.stream import TextStream
from sluice import tiny_model
from sluice.wire.rows import End, Open, TokenLogprob, TokenRow


class Read(NamedTuple):
    tokens: list[int]
    """Includes the tokens that a resumed stream continued from."""
    logprobs: list[TokenLogprob]
    text: str
    end: End


@cache
def decoders() -> Decoders:
    return load_decoders(tiny_model.path() / "tokenizer.json")


def read(opened: Open, sequence: int, rows: Iterable[TokenRow]) -> Read:
    """Read rows up to the end or a stop string. Rows that the engine sent after a stop string are ignored."""
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
