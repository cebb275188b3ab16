"""Converts between rows and columnar batches. The services work on the columns and need no such conversion."""

from collections.abc import Iterator, Sequence

import msgspec

from sluice.wire.rows import Started, TextBatch, TextRow, TokenBatch, TokenRow


def text_batch(detokenizer: str, started: list[Started], rows: Sequence[TextRow], epoch: int = 0) -> TextBatch:
    # TextRow has all fields of TokenRow.
    columns = msgspec.structs.asdict(TokenBatch.of("engine", 1, [], rows))
    shared = columns.keys() & set(TextBatch.__struct_fields__)
    text = [row.text for row in rows]
    return TextBatch(detokenizer, started, text=text, epoch=epoch, **{name: columns[name] for name in shared})


def rows_of(batch: TokenBatch) -> Iterator[TokenRow]:
    start = 0
    for i, count in enumerate(batch.count):
        row = batch.request[i], batch.attempt[i], batch.sequence[i], batch.offset[i]
        rest = batch.logprobs.get(i, []), batch.ends.get(i), batch.accepted.get(i, 0)
        yield TokenRow(*row, batch.tokens[start : start + count], *rest)
        start += count
