"""Prints a generation's stream to the terminal: the text to stdout as it arrives, everything else to stderr."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

from sluice.cli.common import notes
from sluice.client import Chunk, FinishReason, Stream, TokenLogprob, Usage


def write_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class OutputPrinter:
    """Writes the outputs of one request, to stdout unless `write` is given, in the order of their index.

    The first unfinished output is written as it arrives; the text of later outputs is buffered until it is their turn.
    If there are several outputs, a heading with the index precedes each.
    """

    def __init__(self, n: int = 1, write: Callable[[str], None] = write_to_stdout) -> None:
        self._write = write
        self.texts = [""] * n
        """The text of each output so far."""
        self.finish_reasons: dict[int, FinishReason] = {}
        """The finish reason of each finished output, by its index."""
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]
        self._scores: dict[int, tuple[float, int]] = {}
        """(sum of the log-probabilities, number of tokens) of each finished output that has a sum, by its index."""
        self._printing: int | None = None
        """Index of the output that is being written. None before the first chunk."""

    def add(self, chunk: Chunk) -> None:
        """Write or buffer a chunk's text. If its output ends, go on to the next unfinished output."""
        self.texts[chunk.index] += chunk.text
        self._logprobs[chunk.index] += chunk.logprobs
        if chunk.cumulative_logprob is not None:
            self._scores[chunk.index] = chunk.cumulative_logprob, chunk.completion_tokens or 0
        if chunk.finish_reason is not None:
            self.finish_reasons[chunk.index] = chunk.finish_reason
        if self._printing is None:
            self._begin(0)
        elif chunk.index == self._printing:
            self._write(chunk.text)
        while self._printing in self.finish_reasons and self._printing + 1 < len(self.texts):
            self._end(self._printing)
            self._begin(self._printing + 1)

    def close(self) -> None:
        """Write what is still buffered, which happens only if the stream broke, and end the last line."""
        if self._printing is None:
            return
        for index in range(self._printing + 1, len(self.texts)):
            if self.texts[index]:
                self._end(self._printing)
                self._begin(index)
        self._end(self._printing)

    def write_scores(self) -> None:
        """Write the log-probabilities of the outputs' tokens, and their sums, to stderr, as far as there are any."""
        names = [f"output {index}" for index in range(len(self.texts))] if len(self.texts) > 1 else ["output"]
        for name, entries in zip(names, self._logprobs, strict=True):
            write_logprobs(name, entries)
        for index, (score, tokens) in sorted(self._scores.items()):
            write_score(names[index], score, tokens)

    def _begin(self, index: int) -> None:
        """Write the heading of an output and its text so far."""
        self._printing = index
        if len(self.texts) > 1:
            # The format of `head` and `tail` for several files.
            self._write(("\n" if index else "") + f"==> {index} <==\n")
        self._write(self.texts[index])

    def _end(self, index: int) -> None:
        if not self.texts[index].endswith("\n"):
            self._write("\n")


def print_stream(
    start: Callable[[], Stream],
    n: int = 1,
    *,
    stats: bool = False,
    write: Callable[[str], None] = write_to_stdout,
) -> list[str]:
    """Write the `n` outputs of a stream to stdout, and a summary to stderr if that is a terminal, or with `stats`.

    Returns the texts.
    """
    printer = OutputPrinter(n, write)
    started = time.monotonic()
    first_token: float | None = None
    with start() as stream:
        try:
            for chunk in stream:
                # An echoed prompt comes first and has no tokens.
                if chunk.token_count and first_token is None:
                    first_token = time.monotonic() - started
                printer.add(chunk)
        except BaseException:
            printer.close()
            raise
    printer.close()
    write_logprobs("prompt", stream.prompt_logprobs)
    printer.write_scores()
    # A stream that was cancelled has none.
    if stream.usage is not None and (stats or sys.stderr.isatty()):
        reasons = [reason for _, reason in sorted(printer.finish_reasons.items())]
        notes().print(
            summarize(stream.usage, reasons, first_token, time.monotonic() - started), style="dim", markup=False
        )
    return printer.texts


def summarize(usage: Usage, reasons: list[FinishReason], first_token: float | None, seconds: float) -> str:
    """Token counts and speed of a finished stream. `first_token` and `seconds`: time from the request to the first
    token and to the end, in seconds."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    first = "" if first_token is None else f"first token after {first_token:.2f} s · "
    rate = usage.completion_tokens / seconds if seconds > 0 else 0
    drafts = f" ({usage.accepted_draft_tokens} of them drafts)" if usage.accepted_draft_tokens else ""
    counts = Counter(reasons)
    ended_by = ", ".join(f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in counts.items())
    return (
        f"{usage.prompt_tokens} prompt tokens{cached} · {usage.completion_tokens} new{drafts} in {seconds:.2f} s · "
        f"{first}{rate:.1f} tokens/s from request to end · ended by {ended_by}"
    )


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
