"""Rows as batches and back: the services themselves write and read batches column by column."""

from collections.abc import Iterator, Sequence

from sluice.ring.rows import Started, TextBatch, TextRow, TokenBatch, TokenRow


def text_batch(detokenizer: str, started: list[Started], rows: Sequence[TextRow]) -> TextBatch:
    return TextBatch(
        detokenizer,
        started,
        request=[row.request for row in rows],
        attempt=[row.attempt for row in rows],
        sequence=[row.sequence for row in rows],
        offset=[row.offset for row in rows],
        count=[len(row.tokens) for row in rows],
        tokens=[token for row in rows for token in row.tokens],
        logprobs={i: row.logprobs for i, row in enumerate(rows) if row.logprobs},
        ends={i: row.end for i, row in enumerate(rows) if row.end is not None},
        text=[row.text for row in rows],
        accepted={i: row.accepted for i, row in enumerate(rows) if row.accepted},
    )


def rows_of(batch: TokenBatch) -> Iterator[TokenRow]:
    at = 0
    for i, count in enumerate(batch.count):
        row = batch.request[i], batch.attempt[i], batch.sequence[i], batch.offset[i]
        rest = batch.logprobs.get(i, []), batch.ends.get(i), batch.accepted.get(i, 0)
        yield TokenRow(*row, batch.tokens[at : at + count], *rest)
        at += count
