"""Writes log-probabilities to stderr, as tables whose columns are separated by tabs."""

import sys
from collections.abc import Sequence

from sluice.client import TokenLogprob


def write_logprobs(name: str, entries: Sequence[TokenLogprob]) -> None:
    """Write a heading and a line per token: log-probability, rank, token, and the most likely tokens with theirs.

    `name` is what the tokens are of, such as "prompt". Nothing is written without entries.
    """
    if not entries:
        return
    rows = [("logprob", "rank", f"{name} token", "most likely tokens"), *map(_cells, entries)]
    sys.stderr.write("".join("\t".join(row) + "\n" for row in rows))


def _cells(entry: TokenLogprob) -> tuple[str, ...]:
    if entry.logprob is None:
        return "", "", _quoted(entry.token)
    top = (f"{_quoted(token.token)} {token.logprob:.3f}" for token in entry.top)
    return f"{entry.logprob:.3f}", str(entry.rank), _quoted(entry.token), *top


def _quoted(token: bytes) -> str:
    return repr(token.decode(errors="replace"))


def write_score(name: str, score: float, tokens: int) -> None:
    """Write the sum of the log-probabilities of an output's tokens, and their mean."""
    mean = f", {score / tokens:.3f} per token" if tokens else ""
    sys.stderr.write(f"{name}: logprobs add up to {score:.3f}{mean}\n")
