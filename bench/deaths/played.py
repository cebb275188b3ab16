"""One stream as its reader sees it."""

import time
from collections import defaultdict
from typing import Any

import msgspec

from bench.deaths.asked import Asked
from sluice import AsyncClient
from sluice.client import SluiceError

NEARLY = 1e-3
"""Logprobs that differ by less are the same: in a batch of other sequences a sum is made in another order."""


class Heard(msgspec.Struct, frozen=True):
    """One output, whole."""

    text: str
    token_ids: tuple[int, ...]
    logprob_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop: str | int | None

    def difference(self, other: "Heard") -> str:
        """What is not the same, in words; empty: nothing."""
        for name in ("token_ids", "text", "logprob_ids", "finish_reason", "stop"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name}: {here!r:.200} for {there!r:.200}"
        farthest = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"logprobs by up to {farthest}" if farthest > NEARLY else ""


class Played(msgspec.Struct, frozen=True):
    """A stream that was read to its end, or its error."""

    kind: str
    outputs: tuple[Heard, ...]
    faults: tuple[str, ...]
    """What no stream may do: offsets that repeat or leave out, two ends, an error."""
    prompt_tokens: int
    completion_tokens: int
    first_token: float
    """Seconds."""
    stall: float
    """Longest time between two chunks, seconds."""
    resumed: int
    """Times that the client went on at another connection."""
    repeated: bool
    """Something came twice."""

    def difference(self, truth: "Played") -> str:
        """What of it is not as it is undisturbed, but for the time that it took; empty: nothing."""
        if self.faults:
            return f"{self.kind}: {self.faults[0]}"
        if len(self.outputs) != len(truth.outputs):
            return f"{self.kind}: {len(self.outputs)} outputs for {len(truth.outputs)}"
        for index, (output, other) in enumerate(zip(self.outputs, truth.outputs, strict=True)):
            if found := output.difference(other):
                return f"{self.kind}: output {index} differs in {found}"
        counts = [(each.prompt_tokens, each.completion_tokens) for each in (self, truth)]
        return "" if counts[0] == counts[1] else f"{self.kind}: (prompt, completion) tokens {counts[0]} for {counts[1]}"


class _Output:
    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.counted = 0
        self.repeated = False
        self.ends: list[Any] = []


async def play(client: AsyncClient, asked: Asked) -> Played:
    """Read it to its end."""
    outputs: defaultdict[int, _Output] = defaultdict(_Output)
    faults: list[str] = []
    began = last = time.monotonic()
    first = stall = 0.0
    stream = client.stream(asked.prompt, **asked.options)
    try:
        async for chunk in stream:
            now = time.monotonic()
            first = first or now - began
            stall, last = max(stall, now - last), now
            _take(outputs[chunk.index], chunk, faults)
    except SluiceError as error:
        faults.append(f"{type(error).__name__}: {error}")
    for index, output in sorted(outputs.items()):
        if len(output.ends) != 1:
            faults.append(f"output {index} has {len(output.ends)} ends")
    usage = stream.usage
    return Played(
        asked.kind,
        tuple(_heard(output) for _, output in sorted(outputs.items())),
        tuple(faults),
        usage.prompt_tokens if usage else 0,
        usage.completion_tokens if usage else 0,
        first,
        stall,
        stream.resumed,
        any(output.repeated for output in outputs.values()),
    )


def _take(output: _Output, chunk: Any, faults: list[str]) -> None:
    if output.ends:
        output.repeated = True
        faults.append(f"output {chunk.index} goes on after its end")
    if chunk.finish_reason is not None:
        output.ends.append(chunk)
        return
    if chunk.token_offset != output.counted:
        faults.append(f"output {chunk.index}: offset {chunk.token_offset} after {output.counted} tokens")
    output.repeated |= chunk.token_offset < output.counted
    output.counted += chunk.token_count
    output.text.append(chunk.text)
    output.token_ids += chunk.token_ids
    output.logprobs += chunk.logprobs


def _heard(output: _Output) -> Heard:
    end = output.ends[0] if output.ends else None
    return Heard(
        "".join(output.text),
        tuple(output.token_ids),
        tuple(found.token_id for found in output.logprobs),
        tuple(found.logprob for found in output.logprobs),
        str(end.finish_reason) if end else "",
        (end.stop_string or end.stop_token_id) if end else None,
    )
