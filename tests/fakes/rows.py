"""Rows as batches and back: the services themselves write and read batches column by column."""

from collections.abc import Iterator, Sequence

import msgspec

from sluice.ring.rows import Started, TextBatch, TextRow, TokenBatch, TokenRow


def text_batch(detokenizer: str, started: list[Started], rows: Sequence[TextRow]) -> TextBatch:
    # A row of text has all that one of tokens has.
    columns = msgspec.structs.asdict(TokenBatch.of("engine", 1, [], rows))
    shared = columns.keys() & set(TextBatch.__struct_fields__)
    text = [row.text for row in rows]
    return TextBatch(detokenizer, started, text=text, **{name: columns[name] for name in shared})


def rows_of(batch: TokenBatch) -> Iterator[TokenRow]:
    at = 0
    for i, count in enumerate(batch.count):
        row = batch.request[i], batch.attempt[i], batch.sequence[i], batch.offset[i]
        rest = batch.logprobs.get(i, []), batch.ends.get(i), batch.accepted.get(i, 0)
        yield TokenRow(*row, batch.tokens[at : at + count], *rest)
        at += count
