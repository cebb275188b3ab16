"""Streams with a long context whose engine, or whose engine's machine, is lost, on machines with keepers.

python -m tests.system.hosts.kept --precision int8 --tokens 4000 7500

One router, one detokenizer and three engines, each on a machine of its own, with real keys. Prints a line for each
stream and a table of all; with --page also writes the table to docs/measurements/keepers.md. Exit status 1: a stream
failed or differs from the undisturbed one, or more was computed again than had to be.
"""

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench.deaths.precisions import PRECISIONS
from bench.deaths.requests import StreamRequest
from bench.deaths.streams import StreamSeen, connect, read_stream
from bench.harness.engine_counters import ACTIVE_REQUESTS, CONTEXT_TOKENS, FETCHED_BLOCKS, PREFIX, parse
from bench.harness.models import python_prompts
from bench.harness.real_model import real_model
from bench.harness.tables import markdown
from bench.takeover.rings import WatchedStream
from sluice.lanes.keys import Role
from tests.fakes.processes import wait_until
from tests.system.hosts.kept_page import Seen, summary, write_page
from tests.system.hosts.network import Machine, Network, missing
from tests.system.hosts.ring import Ring, Service

KEEPER_PORT, METRICS_PORT = 7001, 9001
BEGUN = 40
"""Output tokens before a disturbance."""
REPORTED_SECONDS = 2.0
"""A heartbeat reports new blocks within a second."""
BLOCK_TOKENS = f"{PREFIX}kv_block_tokens"
REQUESTS = f"{PREFIX}requests_total"
COUNTED = (CONTEXT_TOKENS, FETCHED_BLOCKS, REQUESTS)
PREFILL = "engine-0"
"""The prefill engine of a ring that has one."""
IN_FLIGHT = 16
"""Tokens that may be computed beyond those in a partly filled block: of steps whose rows were lost."""
Settings = Mapping[str, Any]


class KeptRing(Ring):
    """A ring whose engines' machines have a keeper each."""

    counts: Mapping[Role, int] = {"detok": 1, "engine": 3, "router": 1}

    def __init__(self, network: Network, folder: Path, model: Path, engine: Settings, phases: Sequence[str]) -> None:
        """`engine`: settings of all engines. `phases`: of each."""
        super().__init__(network, folder)
        self.model = model
        self._engine = engine
        self._phases = phases
        self._memory = Path(f"/dev/shm/sluice-test-{secrets.token_hex(4)}")
        self.keepers: dict[str, Service] = {}
        """By the seat of the engine."""

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        shutil.rmtree(self._memory, ignore_errors=True)

    def launch(self, seat: str, machine: Machine | None = None) -> Service:
        if not seat.startswith("engine"):
            return super().launch(seat, machine)
        machine = machine or self.network.machine()
        if seat not in self.keepers:
            self._memory.mkdir(mode=0o700, exist_ok=True)
            keys = self.keys.mount("engine")
            flags = ["--kv-folder", str(self._memory / seat), "--listen", f"tcp://{machine.host}:{KEEPER_PORT}"]
            command = [sys.executable, "-m", "engine_worker.keeper", *flags, "--keys", str(keys)]
            self.keepers[seat] = self._run(f"keeper-{seat}", "engine", machine, command)
        return super().launch(seat, machine)

    def lose(self, seat: str) -> Machine:
        """The machine of an engine disappears."""
        machine = self.services[seat].machine
        machine.unplug()
        self.services[seat].kill()
        self.keepers.pop(seat).kill()
        return machine

    def engine_counters(self, seat: str) -> dict[str, float]:
        """Empty if the engine does not answer."""
        try:
            url = f"http://{self.services[seat].machine.host}:{METRICS_PORT}/metrics"
            with urllib.request.urlopen(url, timeout=2) as page:
                return parse(page.read().decode().splitlines())
        except OSError:
            return {}

    def busy(self) -> str:
        """The engine that has a request."""
        found = list[str]()

        def look() -> bool:
            seats = [service.seat for service in self.of("engine")]
            found[:] = [seat for seat in seats if self.engine_counters(seat).get(ACTIVE_REQUESTS)]
            return bool(found)

        if not wait_until(look, 30):
            raise RuntimeError("no engine has a request")
        return found[0]

    def _flags(self, seat: str, role: Role, machine: Machine, **overrides: Any) -> list[str]:
        if role == "engine":
            number = int(seat.rpartition("-")[2])
            overrides |= {
                **self._engine,
                "kv_folder": self._memory / seat,
                "kv_keeper": f"tcp://{machine.host}:{KEEPER_PORT}",
                "metrics_host": machine.ip,
                "metrics_port": METRICS_PORT,
                "phase": self._phases[number],
            }
        return super()._flags(seat, role, machine, **overrides)


Case = Callable[[], Coroutine[Any, Any, Seen]]


@dataclass
class Cases:
    """The streams of one ring, each with a salt of its own, so that it finds no block of another one."""

    ring: KeptRing
    prompt: list[int]
    tokens: int
    """Of the prompt."""
    max_tokens: int
    truth: StreamSeen | None = None
    _counted: dict[tuple[str, str], float] = field(default_factory=dict)
    _salts: int = 0

    async def undisturbed(self) -> None:
        async with connect(self.ring.addresses) as client:
            self.truth = await read_stream(client, self.request())

    async def engine_killed(self) -> Seen:
        """The keeper on the dead engine's machine still has its blocks."""
        return await self._disturbed("engine killed, its keeper lives", self.request(), self._kill, self._last_block)

    async def machine_lost(self) -> Seen:
        """Nothing is left: everything is computed again."""
        return await self._disturbed("machine lost", self.request(), self._lose, self.tokens + self.max_tokens)

    async def machine_lost_with_a_copy(self) -> Seen:
        """Another keeper has the prompt, from an engine that has computed it before."""
        request = self.request()
        self._count()
        async with connect(self.ring.addresses) as client:
            warm = StreamRequest("warm", request.prompt, {**request.options, "max_tokens": 1})
            await read_stream(client, warm)
        # Until the router knows what the engine has.
        await asyncio.sleep(REPORTED_SECONDS)
        first = max((s.seat for s in self.ring.of("engine")), key=self._computed_since)
        self._kill(first)
        # The output is computed again.
        limit = self._last_block + self.max_tokens
        seen = await self._disturbed("machine lost, another keeper has a copy", request, self._lose, limit)
        await asyncio.to_thread(self._revive, first)
        return seen

    async def prefill_engine_killed(self) -> Seen:
        """While it computes the prompt: an engine that generates computes what it cannot copy."""
        self._count()
        case, limit = "prefill engine killed, before it hands over", self.tokens + IN_FLIGHT
        return await self._disturbed(case, self.request(), self._kill, limit, self._computing)

    async def decode_engine_killed(self) -> Seen:
        case = "decode engine killed, after it was handed a request"
        return await self._disturbed(case, self.request(), self._kill, self._last_block)

    async def divided(self) -> Seen:
        """One machine computes the prompt, another one continues."""
        self._count()
        async with connect(self.ring.addresses) as client:
            stream = WatchedStream(client, self.request())
            seen = await stream.task
        decoding = [service.seat for service in self.ring.of("engine") if service.seat != PREFILL]
        return self._seen("prefill and decode on two machines", stream, seen, decoding, self._last_block, 0.0)

    @property
    def together(self) -> Sequence[Case]:
        """The cases of a ring whose engines compute everything."""
        return self.engine_killed, self.machine_lost_with_a_copy, self.machine_lost

    @property
    def apart(self) -> Sequence[Case]:
        """The cases of a ring with prefill and decode engines."""
        return self.divided, self.prefill_engine_killed, self.decode_engine_killed

    @property
    def _last_block(self) -> int:
        """The most that is computed again if all full blocks are copied."""
        pages = [self.ring.engine_counters(service.seat) for service in self.ring.of("engine")]
        return int(max(page.get(BLOCK_TOKENS, 0) for page in pages)) + IN_FLIGHT

    def request(self) -> StreamRequest:
        self._salts += 1
        options = {"max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0.0, "logprobs": 1}
        salt = {"kv_cache": {"salt": f"{self.tokens} {self._salts}"}, "token_ids": True}
        return StreamRequest("greedy", self.prompt, {**options, **salt})

    async def _generating(self, stream: WatchedStream) -> str:
        """Wait for the first output; returns the engine that generates it."""
        await stream.until(BEGUN)
        return await asyncio.to_thread(self.ring.busy)

    async def _computing(self, _: WatchedStream) -> str:
        """Wait until the prefill engine has the request; returns that engine."""
        if not await asyncio.to_thread(wait_until, lambda: self._grown(PREFILL, REQUESTS) > 0, 30):
            raise RuntimeError("the prefill engine has no request")
        return PREFILL

    async def _disturbed(
        self,
        case: str,
        request: StreamRequest,
        harm: Callable[[str], Any],
        limit: int,
        victim_of: Callable[[WatchedStream], Awaitable[str]] | None = None,
    ) -> Seen:
        """`victim_of`: waits for the moment to harm an engine, and returns that engine; by default `_generating`."""
        async with connect(self.ring.addresses) as client:
            stream = WatchedStream(client, request)
            victim = await (victim_of or self._generating)(stream)
            await asyncio.to_thread(self._count)
            struck = time.monotonic()
            await asyncio.to_thread(harm, victim)
            if victim_of and stream.tokens:
                raise RuntimeError(f"{case}: the first token came before the disturbance")
            seen = await stream.task
            others = [service.seat for service in self.ring.of("engine") if service.seat != victim]
            found = await asyncio.to_thread(self._seen, case, stream, seen, others, limit, struck)
        await asyncio.to_thread(self._revive, victim)
        return found

    def _seen(
        self, case: str, stream: WatchedStream, seen: StreamSeen, seats: list[str], limit: int, struck: float
    ) -> Seen:
        if self.truth is None:
            raise RuntimeError("there is no undisturbed stream")
        same = [output.logprobs for output in seen.outputs] == [output.logprobs for output in self.truth.outputs]
        computed = sum(self._computed_since(seat) for seat in seats)
        fetched = sum(self._grown(seat, FETCHED_BLOCKS) for seat in seats)
        pause = max(stream.gaps(struck), default=0.0)
        if stream.times and 0 < struck < stream.times[0]:
            pause = max(pause, stream.times[0] - struck)
        difference = seen.difference(self.truth)
        return Seen(case, stream.first_token, pause, computed, limit, fetched, difference, same)

    def _count(self) -> None:
        for service in self.ring.of("engine"):
            page = self.ring.engine_counters(service.seat)
            self._counted |= {(service.seat, metric): page.get(metric, 0) for metric in COUNTED}

    def _computed_since(self, seat: str) -> int:
        return self._grown(seat, CONTEXT_TOKENS)

    def _grown(self, seat: str, metric: str) -> int:
        """Since `_count`. 0 for an engine that does not answer."""
        page = self.ring.engine_counters(seat)
        return int(page[metric] - self._counted.get((seat, metric), 0)) if metric in page else 0

    def _kill(self, seat: str) -> None:
        self.ring.services[seat].kill()

    def _lose(self, seat: str) -> None:
        self.ring.lose(seat)

    def _revive(self, seat: str) -> None:
        machine = self.ring.services[seat].machine
        machine.plug()
        self.ring.start(seat, machine)


def engine_settings(precision: str, tokens: int) -> Settings:
    return {**PRECISIONS[precision], "threads": 1, "kv_cache_tokens": 2 * tokens + 2048, "max_batch_size": 8}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.system.hosts.kept", description=__doc__)
    parser.add_argument("--precision", nargs="+", default=["float32", "int8"], choices=list(PRECISIONS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4000, 7500], help="lengths of the prompts")
    parser.add_argument("--repeats", type=int, default=1, help="streams of each case")
    parser.add_argument("--page", action="store_true", help="write docs/measurements/keepers.md")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs")
    given = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    console, found = Console(), dict[str, list[Seen]]()
    with tempfile.TemporaryDirectory() as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for precision in given.precision:
            for tokens in given.tokens:
                title = f"{precision}, {tokens:,} tokens"
                found[title] = []
                for seen in run(logs, real_model(), precision, tokens, 160, given.repeats):
                    print(f"{title}: {seen.text}", flush=True)
                    found[title].append(seen)
    for title, runs in found.items():
        console.print(Markdown(markdown(summary(title, runs))))
    if given.page:
        write_page(found, sys.argv[1:])
    raise SystemExit(not all(seen.good for runs in found.values() for seen in runs))


def run(folder: Path, model: Path, precision: str, tokens: int, max_tokens: int, repeats: int = 1) -> Iterator[Seen]:
    """All cases with a prompt of this many tokens, each `repeats` times."""
    (prompt,) = python_prompts(model, 1, tokens)
    settings = engine_settings(precision, tokens)
    truth: StreamSeen | None = None
    for phases in (("both",) * 3, ("prefill", "decode", "decode")):
        logs = Path(tempfile.mkdtemp(dir=folder))
        with Network(logs) as network, KeptRing(network, logs, model, settings, phases) as ring:
            cases = Cases(ring, prompt, tokens, max_tokens, truth)
            if truth is None:
                asyncio.run(cases.undisturbed())
                truth = cases.truth
            for _ in range(repeats):
                for case in cases.apart if "prefill" in phases else cases.together:
                    yield asyncio.run(case())


if __name__ == "__main__":
    main()
