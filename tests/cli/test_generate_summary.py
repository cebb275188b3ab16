"""What `sluice generate` writes after the text: the summary, log-probabilities, the scores of beams."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sluice.cli.stream_printer import print_stream, summarize
from sluice.client import Chunk, FinishReason, TokenLogprob, Usage


def read(terminal: int) -> bytes:
    """The available output. Empty once the other side is closed and everything has been read."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_stats_writes_the_summary_to_a_file_too(sluice) -> None:
    result = sluice("generate", "x", "--stats")
    assert result.stdout == "Hello, world\n"
    assert re.match(r"3 prompt tokens \(2 cached\) · 3 new in .* · first token after .* tokens/s ", result.stderr)


@pytest.mark.process
def test_a_summary_is_written_to_a_terminal(address) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "sluice", "generate", "x", "--address", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    with process:
        assert process.stdout is not None
        assert process.stdout.read() == b"Hello, world\n"
    shown = b"".join(iter(lambda: read(master), b"")).decode()
    assert "3 prompt tokens (2 cached) · 3 new" in shown
    assert "ended by length" in shown


def test_times_count_from_the_request(monkeypatch, capsys) -> None:
    """The stream takes 2 s to open, 1 s to the first token and 2 s from there to the end."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    class Fake:
        usage = Usage(prompt_tokens=7, completion_tokens=10, cached_tokens=0, accepted_draft_tokens=0)
        prompt_logprobs = ()

        def __init__(self) -> None:
            clock.now += 2

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            yield Chunk(0, text="echo")
            clock.now += 1
            yield Chunk(0, text="a", token_count=1)
            clock.now += 2
            yield Chunk(0, text="b", token_count=9, finish_reason="eos")

    clock = Clock()
    monkeypatch.setattr("sluice.cli.stream_printer.time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert print_stream(Fake) == ["echoab"]
    assert (
        "7 prompt tokens · 10 new in 5.00 s · first token after 3.00 s · 2.0 tokens/s from request to end · "
        "ended by eos"
    ) in capsys.readouterr().err


def test_the_summary_counts_the_finish_reasons_of_several_outputs() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=30, cached_tokens=0, accepted_draft_tokens=0)
    reasons = [FinishReason.EOS, FinishReason.LENGTH, FinishReason.EOS]
    summary = summarize(usage, reasons, None, 3.0)
    assert summary.endswith("30 new in 3.00 s · 10.0 tokens/s from request to end · ended by eos (2), length (1)")


def test_the_summary_counts_accepted_drafts() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=30, cached_tokens=0, accepted_draft_tokens=12)
    summary = summarize(usage, [FinishReason.EOS], None, 3.0)
    assert "30 new (12 of them drafts) in 3.00 s" in summary


def finished_stream(*chunks: Chunk, prompt_logprobs: tuple[TokenLogprob, ...] = ()) -> Callable[[], Any]:
    class Finished:
        usage = None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            yield from chunks

    Finished.prompt_logprobs = prompt_logprobs
    return Finished


def test_log_probabilities_of_prompt_and_output(capsys) -> None:
    best = TokenLogprob(5, b" b", -0.25, 1, ())
    prompt = (TokenLogprob(1, b"a\n", None, 0, ()), TokenLogprob(2, b"\xff", -1.5, 3, (best,)))
    chunks = [Chunk(0, "c", logprobs=(TokenLogprob(6, b"c", -2.0, 7, ()),)), Chunk(0, " b", logprobs=(best,))]
    end = Chunk(0, finish_reason=FinishReason.EOS, completion_tokens=2, cumulative_logprob=-2.25)
    print_stream(finished_stream(*chunks, end, prompt_logprobs=prompt))
    printed = capsys.readouterr()
    assert printed.out == "c b\n"
    assert printed.err == (
        "logprob\trank\tprompt token\tmost likely tokens\n\t\t'a\\n'\n-1.500\t3\t'\ufffd'\t' b' -0.250\n"
        "logprob\trank\toutput token\tmost likely tokens\n-2.000\t7\t'c'\n-0.250\t1\t' b'\n"
        "output: logprobs add up to -2.250, -1.125 per token\n"
    )


def test_the_scores_of_beams_follow_the_outputs(capsys) -> None:
    ends = [
        Chunk(index, f"text {index}", finish_reason=FinishReason.EOS, completion_tokens=tokens, cumulative_logprob=-3.0)
        for index, tokens in ((0, 4), (1, 0))
    ]
    print_stream(finished_stream(*ends), 2)
    printed = capsys.readouterr()
    assert printed.out == "==> 0 <==\ntext 0\n\n==> 1 <==\ntext 1\n"
    assert printed.err == (
        "output 0: logprobs add up to -3.000, -0.750 per token\noutput 1: logprobs add up to -3.000\n"
    )
