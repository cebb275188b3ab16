"""The tokens of one stream, as an engine puts them into its outbox."""

from sluice.wire.params import TextParams
from sluice.wire.rows import End, Open, TokenLogprob, TokenRow

OPENED = Open(1, 0, 1, TextParams(), "mem://router", 3, 0)


def row(offset: int, *tokens: int, sequence: int = 0, end: End | None = None) -> TokenRow:
    return TokenRow(1, 0, sequence, offset, list(tokens), [TokenLogprob(-float(t), 1, []) for t in tokens], end)
