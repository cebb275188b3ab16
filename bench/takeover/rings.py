"""Rings with and without pool files, and a stream whose progress is watched while it runs."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.deaths.precisions import PRECISIONS, model_of
from bench.deaths.requests import StreamRequest
from bench.deaths.streams import StreamSeen, read_stream
from bench.harness import pool_files
from bench.harness.models import TINY
from bench.harness.ports import free_ports
from bench.harness.real_model import real_model
from bench.harness.topic import Plan
from sluice import AsyncClient
from sluice.launch import Ring


class LongPlan(Plan, frozen=True, kw_only=True):
    """Long prompts through one router and one detokenizer. `threads` are shared by two engines, also where only one
    runs: the bits of its results may depend on the number of threads."""

    real: bool = True
    """SmolLM2-135M-Instruct; otherwise the bundled model."""
    kv_cache_tokens: int = 16_384

    @property
    def model(self) -> Path:
        """With the tokenizer."""
        return real_model() if self.real else TINY

    @property
    def model_name(self) -> str:
        return "SmolLM2-135M-Instruct" if self.real else "The bundled model"

    @contextmanager
    def ring(self, precision: str, kv: str, **engines: int) -> Iterator[Ring]:
        """`engines`: the numbers of engines, by the ring's options."""
        settings: Mapping[str, Any] = {
            "threads": max(1, self.threads // 2),
            "kv_cache_tokens": self.kv_cache_tokens,
            **PRECISIONS[precision],
            **pool_files.engine_args(kv == pool_files.ON),
        }
        options: dict[str, Any] = {"detokenizers": 1, "engine_args": settings, **engines}
        model = model_of(precision) if self.real else self.model
        with Ring(model, metrics_port=free_ports(sum(engines.values()) + 2), **options) as ring:
            yield ring


class WatchedStream:
    """A running stream, and the times of its tokens. Times are monotonic."""

    def __init__(self, client: AsyncClient, request: StreamRequest) -> None:
        self.began = time.monotonic()
        self.times: list[float] = []
        self.tokens = 0
        self._grew = asyncio.Event()
        self.task: asyncio.Task[StreamSeen] = asyncio.create_task(read_stream(client, request, self._on_chunk))
        self.task.add_done_callback(lambda _: self._grew.set())

    def _on_chunk(self, chunk: Any) -> None:
        if chunk.token_count:
            self.times.append(time.monotonic())
            self.tokens += chunk.token_count
            self._grew.set()

    async def until(self, tokens: int) -> None:
        """Waits for this number of tokens. Raises RuntimeError if the stream ends before it."""
        while self.tokens < tokens:
            if self.task.done():
                faults = (await self.task).faults
                raise RuntimeError(f"a stream ended after {self.tokens} tokens, before {tokens}: {' '.join(faults)}")
            self._grew.clear()
            await self._grew.wait()

    @property
    def first_token(self) -> float:
        """Seconds from the call to the first token."""
        return self.times[0] - self.began if self.times else 0.0

    def gaps(self, since: float, until: float = float("inf")) -> list[float]:
        """Times between two deltas, of which the second arrived in this period."""
        return [b - a for a, b in pairwise(self.times) if since <= b <= until]
