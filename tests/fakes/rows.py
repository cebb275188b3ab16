"""Rows of a token batch, which the detokenizer itself reads column by column."""

from collections.abc import Iterator

from sluice.ring.wire import TokenBatch, TokenRow


def rows_of(batch: TokenBatch) -> Iterator[TokenRow]:
    at = 0
    for i, count in enumerate(batch.count):
        row = batch.request[i], batch.attempt[i], batch.sequence[i], batch.offset[i]
        yield TokenRow(*row, batch.tokens[at : at + count], batch.logprobs.get(i, []), batch.ends.get(i))
        at += count
