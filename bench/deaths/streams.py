"""Continuous streams of every kind, each compared with its undisturbed run."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.deaths import tensors
from bench.deaths.requests import KINDS, StreamRequest, in_turns
from bench.harness import pool_files
from bench.harness.stats import thinned
from bench.harness.tables import number
from bench.harness.topic import Plan
from sluice import AsyncClient
from sluice.client import SluiceError, Tensor
from sluice.launch import Ring
from sluice.loadgen.report import percentile

MIXED = (
    "greedy, seeded, n = 2, stop strings, penalties, logprobs, logprobs of the prompt, n-grams with bad words, a "
    "logits processor, speculation, draft tokens with logits, prompt tables, guided decoding, beam search and tensors "
    "mixed"
)
NEARLY = 1e-3
"""Tolerance of log-probabilities, since the order of sums depends on the batch."""
RESUME_SECONDS = 120.0
PEER_SECONDS = 2.0
"""Seconds without heartbeats after which routers consider a peer dead."""
MAX_FAILED_STARTS = 100
"""A service that is killed while it starts, several times in a row, is not broken."""
ENGINE: Mapping[str, Any] = {
    "kv_cache_tokens": 32_768,
    "max_batch_size": 64,
    "max_draft_batch": 64,
    "logits_processors": {"no_repeats": "bench.deaths.processor:no_repeats"},
}
SHOWN_FAULTS = 8


class StreamsPlan(Plan, frozen=True):
    """Streams through a ring. `threads` are the threads of all engines together."""

    streams: int = 64
    max_tokens: int = 200
    routers: int = 2
    engines: int = 2
    detokenizers: int = 3
    mixed: str = MIXED
    files: bool = True
    """Whether engines have pool files."""
    resume_seconds: float = RESUME_SECONDS
    """For which a client waits for new tokens after a failure."""

    @property
    def text(self) -> str:
        services = f"{self.routers} routers, {self.engines} engines and {self.detokenizers} detokenizers"
        return f"{self.streams} continuous streams ({self.mixed}) through {services}"

    @property
    def requests(self) -> list[StreamRequest]:
        return in_turns(KINDS, self.streams, self.max_tokens)

    def ring(self, engine: Mapping[str, Any], router: Mapping[str, Any] | None = None, **options: Any) -> Ring:
        """`engine` and `router` are additional settings of these services."""
        return Ring(
            engines=self.engines,
            detokenizers=self.detokenizers,
            routers=self.routers,
            engine_args={
                **ENGINE,
                "threads": max(1, self.threads // self.engines),
                **pool_files.engine_args(self.files),
                **engine,
            },
            router_args={"peer_timeout": PEER_SECONDS, **(router or {})},
            max_failed_starts=MAX_FAILED_STARTS,
            **options,
        )


def connect(addresses: Sequence[str], resume_seconds: float = RESUME_SECONDS) -> AsyncClient:
    return AsyncClient(addresses, resume_timeout=resume_seconds, retry_timeout=resume_seconds)


class OutputSeen(msgspec.Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]
    logprob_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop: str | int | None

    def difference(self, other: "OutputSeen") -> str:
        for name in ("token_ids", "text", "logprob_ids", "finish_reason", "stop"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name}: {here!r:.200} instead of {there!r:.200}"
        farthest = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"logprobs by up to {farthest}" if farthest > NEARLY else ""


class StreamSeen(msgspec.Struct, frozen=True):
    request: StreamRequest
    outputs: tuple[OutputSeen, ...]
    faults: tuple[str, ...]
    """Violations of the protocol: repeated or skipped offsets, two ends, an error."""
    usage: tuple[int, int]
    """Prompt and completion tokens."""
    first_token: float
    stall: float
    """Longest time between two chunks, in seconds."""
    resumed: int
    repeated: bool
    prompt: tuple[tuple[int, float], ...] = ()
    """Token and log-probability, if requested."""
    rows: Mapping[tensors.Key, NDArray[np.float32]] = msgspec.field(default_factory=dict)
    """Of tensors."""

    @property
    def kind(self) -> str:
        return self.request.kind

    def difference(self, truth: "StreamSeen") -> str:
        """Describes the difference from the undisturbed stream, except for times. Empty if they are equal."""
        if self.faults:
            return f"{self.kind}: {self.faults[0]}"
        if len(self.outputs) != len(truth.outputs):
            return f"{self.kind}: {len(self.outputs)} outputs instead of {len(truth.outputs)}"
        for index, (output, other) in enumerate(zip(self.outputs, truth.outputs, strict=True)):
            if found := output.difference(other):
                return f"{self.kind}: output {index} differs in {found}"
        if _far_apart(self.prompt, truth.prompt):
            return f"{self.kind}: the log-probabilities of the prompt differ"
        if found := tensors.difference(self.rows, truth.rows):
            return f"{self.kind}: {found}"
        if self.usage != truth.usage:
            return f"{self.kind}: (prompt, completion) tokens {self.usage} instead of {truth.usage}"
        return ""


def _far_apart(found: Sequence[tuple[int, float]], truth: Sequence[tuple[int, float]]) -> bool:
    if [token for token, _ in found] != [token for token, _ in truth]:
        return True
    return any(abs(a - b) > NEARLY for (_, a), (_, b) in zip(found, truth, strict=True))


def _output(index: int, chunks: Sequence[Any], faults: list[str]) -> tuple[OutputSeen, bool]:
    """One output from all its chunks, and whether a token arrived twice. Appends to `faults`."""
    counted, repeated = 0, False
    ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
    given = [chunk for chunk in chunks if chunk.finish_reason is None]
    if len(ends) != 1 or chunks[-1] is not ends[0]:
        faults.append(f"output {index} has {len(ends)} ends, or continues after its end")
        repeated = bool(ends) and chunks[-1] is not ends[0]
    for chunk in given:
        if chunk.token_offset != counted:
            faults.append(f"output {index}: offset {chunk.token_offset} after {counted} tokens")
        repeated |= chunk.token_offset < counted
        counted += chunk.token_count
    logprobs = [found for chunk in given for found in chunk.logprobs]
    seen = OutputSeen(
        "".join(chunk.text for chunk in given),
        tuple(token for chunk in given for token in chunk.token_ids),
        tuple(found.token_id for found in logprobs),
        tuple(found.logprob for found in logprobs),
        str(ends[0].finish_reason) if ends else "",
        (ends[0].stop_string or ends[0].stop_token_id) if ends else None,
    )
    return seen, repeated


def _ignore(_: Any) -> None: ...


async def read_stream(
    client: AsyncClient, request: StreamRequest, on_chunk: Callable[[Any], None] = _ignore
) -> StreamSeen:
    """Reads a stream to its end. `on_chunk` is called with each chunk when it arrives."""
    chunks: defaultdict[int, list[Any]] = defaultdict(list)
    parts: list[Tensor] = []
    faults: list[str] = []
    began = last = time.monotonic()
    first = stall = 0.0
    stream = client.stream(request.prompt, **request.options)
    try:
        async for chunk in stream:
            now = time.monotonic()
            first = first or now - began
            stall, last = max(stall, now - last), now
            on_chunk(chunk)
            if chunk.tensor is not None:
                parts.append(chunk.tensor)
            else:
                chunks[chunk.index].append(chunk)
    except SluiceError as error:
        faults.append(f"{type(error).__name__}: {error}")
    outputs = [_output(index, own, faults) for index, own in sorted(chunks.items())]
    usage = stream.usage
    return StreamSeen(
        request,
        tuple(seen for seen, _ in outputs),
        tuple(faults),
        (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0),
        first,
        stall,
        stream.resumed,
        any(repeated for _, repeated in outputs),
        tuple((found.token_id, found.logprob or 0.0) for found in stream.prompt_logprobs),
        tensors.join(parts, faults),
    )


async def undisturbed(
    client: AsyncClient, requests: Sequence[StreamRequest], done: Callable[[], None]
) -> list[StreamSeen]:
    """Runs all streams together to their ends, without drafts; `done` is called after each. Raises RuntimeError if one
    fails."""

    async def one(each: StreamRequest) -> StreamSeen:
        plain = {name: value for name, value in each.options.items() if name != "speculation"}
        found = await read_stream(client, msgspec.structs.replace(each, options=plain))
        done()
        if found.faults:
            raise RuntimeError(f"an undisturbed stream failed: {found.faults[0]}")
        return found

    return list(await asyncio.gather(*map(one, requests)))


async def without_pause(
    client: AsyncClient,
    requests: Sequence[StreamRequest],
    quiet: Sequence[StreamSeen],
    until: "asyncio.Task[Any]",
    add: Callable[[StreamSeen, StreamSeen], None],
) -> None:
    """Repeats each stream until the task is done and the streams running at that time have ended.

    `add` is called with each ended stream and its undisturbed counterpart.
    """

    async def repeat(each: StreamRequest, truth: StreamSeen) -> None:
        while not until.done():
            add(await read_stream(client, each), truth)

    await asyncio.gather(*(repeat(each, truth) for each, truth in zip(requests, quiet, strict=True)))


class StreamTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of ended streams. Times are in seconds, thinned."""

    streams: int
    failed: int = 0
    wrong: int = 0
    """Number of streams that differ from the undisturbed run, including errors."""
    resumed: int = 0
    repeated: int = 0
    first: list[float]
    """Time to first token of each stream."""
    stall: list[float]
    faults: list[str] = []


class StreamCounter:
    """Counts ended streams: a soak test has too many to store all of them."""

    def __init__(self) -> None:
        self._counts = Counter(streams=0, failed=0, wrong=0, resumed=0, repeated=0)
        self._first: list[float] = []
        self._stall: list[float] = []
        self._faults: list[str] = []
        self.wrong: list[tuple[StreamSeen, StreamSeen]] = []
        """The first streams that differ, with their undisturbed counterparts."""

    def add(self, found: StreamSeen, truth: StreamSeen) -> None:
        difference = found.difference(truth)
        seen = {"failed": found.faults, "wrong": difference, "resumed": found.resumed, "repeated": found.repeated}
        self._counts.update(streams=1, **{name: bool(value) for name, value in seen.items()})
        self._first.append(found.first_token)
        self._stall.append(found.stall)
        if difference:
            self._faults = [*self._faults, difference][:SHOWN_FAULTS]
            self.wrong = [*self.wrong, (found, truth)][:SHOWN_FAULTS]

    def totals(self) -> dict[str, Any]:
        return {**self._counts, "first": thinned(self._first), "stall": thinned(self._stall), "faults": self._faults}


def wait_cells(first: Sequence[float], stall: Sequence[float]) -> str:
    """Cells with p50 and p99 of the time to first token, then of the longest pause, in milliseconds."""
    return " | ".join(number(1000 * percentile(times, p)) for times in (first, stall) for p in (50, 99))
