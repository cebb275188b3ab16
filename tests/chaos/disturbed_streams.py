"""Streams on engines with pool files that are disturbed in the middle, and the tokens that are computed again."""

import asyncio
import fcntl
import os
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.deaths.freeze import Leftovers, leftovers
from sluice import AsyncClient
from sluice.launch import Ring
from tests.fakes.processes import LIMIT

PROMPT = "".join(f"def f{i}(x):\n    return x + {7 * i % 50}\n\n\n" for i in range(30))
STREAMS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "seed": 2, "n": 2}]
SEQUENCES = 4
BEGUN = 20
"""Tokens of a stream's first output after which the engines may be disturbed."""
NOTHING = Leftovers([])
COUNTED = re.compile(r"^sluice_engine_context_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass
class Output:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list, compare=False)


Outputs = dict[int, Output]
"""Outputs of a request by index."""


@dataclass
class PoolFileRing:
    ring: Ring
    folder: Path
    block: int
    """Tokens per block."""
    tokens: int = 400
    """Of each stream."""
    exact: bool = False
    """Whether log-probabilities must have the same bits."""
    undisturbed: list[Outputs] = field(default_factory=list)
    """The first test fills in the list."""

    @property
    def limit(self) -> int:
        """Limit on the tokens that streams compute again on the next engine: the last block and the newest token."""
        return SEQUENCES * (self.block + 1)

    def computed(self) -> dict[str, float]:
        """Context tokens that each engine has computed since its start. Engines that do not answer are left out."""
        found = {}
        for number in range(2):
            with suppress(OSError):
                url = f"http://127.0.0.1:{self.ring.plan.metrics_port + 1 + number}/metrics"
                with urllib.request.urlopen(url, timeout=2.0) as answer:
                    page = answer.read().decode()
                if counted := COUNTED.search(page):
                    found[f"engine-{number}"] = float(counted[1])
        return found

    async def disturb(self, disturb: Callable[[str], None]) -> float:
        """Check that streams which are disturbed in the middle equal undisturbed ones. Returns the context tokens that
        were computed after the disturbance. `disturb`: called with the engine that serves most of the streams."""
        # No blocks of former tests are found, nor of a former attempt, nor of the other streams.
        salt = os.urandom(8).hex()
        async with AsyncClient(self.ring.addresses, timeout=3 * LIMIT) as client:
            assert await leftovers(client, self.ring) == NOTHING
            if not self.undisturbed:
                never = asyncio.Semaphore(0)
                self.undisturbed += await asyncio.gather(*(self._follow(client, each, "", never) for each in STREAMS))
            begun, idle = asyncio.Semaphore(0), self.computed()
            streams = [
                asyncio.create_task(self._follow(client, each, f"{salt} {number}", begun))
                for number, each in enumerate(STREAMS)
            ]
            for _ in streams:
                await begun.acquire()
            assert not any(stream.done() for stream in streams)
            before = self.computed()
            await asyncio.to_thread(disturb, max(before, key=lambda name: before[name] - idle[name]))
            self._compare(await asyncio.gather(*streams))
            after = self.computed()
        # An engine that was restarted counts from 0.
        former = {name: before.get(name, 0.0) for name in after}
        computed = sum(count - (former[name] if count >= former[name] else 0.0) for name, count in after.items())
        assert computed > 0, "no stream had to continue elsewhere"
        return computed

    def wait_until_ready(self) -> None:
        """Until both engines run again: each has a file, and no file is dead."""
        end = time.monotonic() + LIMIT
        while len(self._files()) != 2 or any(map(is_dead, self._files())) or len(self.computed()) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)

    def _files(self) -> list[Path]:
        return list(self.folder.glob("*/*.pool"))

    def _compare(self, found: list[Outputs]) -> None:
        assert found == self.undisturbed
        for expected, actual in zip(self.undisturbed, found, strict=True):
            for index, output in expected.items():
                logprobs = output.logprobs if self.exact else pytest.approx(output.logprobs, abs=1e-3)
                assert actual[index].logprobs == logprobs

    async def _follow(self, client: AsyncClient, options: dict, salt: str, begun: asyncio.Semaphore) -> Outputs:
        """Read a stream. Releases `begun` once, after the first tokens."""
        outputs: Outputs = {}
        released = False
        fields = {"ignore_eos": True, "token_ids": True, "logprobs": 0, "kv_cache": {"salt": salt}}
        async for chunk in client.stream(PROMPT, max_tokens=self.tokens, **fields, **options):
            output = outputs.setdefault(chunk.index, Output())
            if chunk.token_ids:
                assert chunk.token_offset == len(output.ids)
            output.text += chunk.text
            output.ids += chunk.token_ids
            output.logprobs += [each.logprob for each in chunk.logprobs]
            if not released and chunk.index == 0 and len(output.ids) > BEGUN:
                released = True
                begun.release()
        return outputs


def is_dead(path: Path) -> bool:
    """Whether the file has no owner."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
