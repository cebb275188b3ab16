"""The real services on the simulated network, each as a process that can be killed, frozen, drained and restarted."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import structlog

import engine_worker.ringside.worker
import router.app
from detok_service.decoders import ByteDecoder, Decoders
from detok_service.service import Detokenizer, Identity
from engine_worker.kvcache.copies import Target
from engine_worker.pool_files.folder import PoolFolder
from router.access.principal import Principal
from sluice.settings.services import EngineSettings, RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.wire.heartbeats import Phase
from sluice.wire.requests import ToDetokenizer
from sluice.wire.timing import HEARTBEAT_SECONDS
from tests.fakes.runner import ScriptedRunner
from tests.sim.network import Network, SimInbox
from tests.sim.world import GENERATIONS, checkpoint, tables

FAILING_COPY = 4
"""Of each engine, every copy with a number that this divides fails."""
SILENT = structlog.wrap_logger(None, processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])


@cache
def engine_settings(name: str, address: str, policy: str, phase: Phase) -> EngineSettings:
    return EngineSettings(
        model=checkpoint().path.as_posix(),
        id=name,
        listen=address,
        max_batch_size=6,
        max_tokens_per_step=24,
        capacity_scheduler_policy=policy,
        drain_timeout=4.0,
        tensor_buffer=64,
        phase=phase,
    )


@cache
def router_settings(name: str, address: str, engines: tuple[str, ...], detokenizers: tuple[str, ...]) -> RouterSettings:
    return RouterSettings(
        model="tiny",
        id=name,
        listen=address,
        engines=engines,
        detokenizers=detokenizers,
        peer_timeout=2.0,
        stall_timeout=8.0,
        recovery_timeout=60.0,
        recovery_attempts=30,
        max_undelivered_tokens=12,
        max_undelivered_bytes=100,
    )


class Process:
    """The tasks of a service, and a gate that they wait for while the process is frozen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"ipc:///sim/{name}"
        self.alive = True
        self.ended = False
        """Whether it has ended by itself."""
        self.tasks: list[asyncio.Task] = []
        self._gate = asyncio.Event()
        self._gate.set()

    async def gate(self) -> None:
        await self._gate.wait()

    def freeze(self) -> None:
        self._gate.clear()

    def thaw(self) -> None:
        self._gate.set()

    def kill(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.cancel()

    def drain(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Poison:
    """A request, by its seed, that kills every engine which samples its token at `position` or later."""

    seed: int
    position: int


class Killed(BaseException):
    """The process has died in the middle of a step."""


class MortalRunner(ScriptedRunner):
    """A scripted runner that a poisonous request kills."""

    poison: Poison | None = None

    def run(self, step):
        poison = self.poison
        draws = [draw for part in step.slices for draw in part.draws]
        if poison and any(draw.sampling.seed == poison.seed and draw.position >= poison.position for draw in draws):
            raise Killed
        return super().run(step)


class SimEngine(Process):
    """The Worker of engine_worker with a scripted runner."""

    def __init__(
        self,
        network: Network,
        name: str,
        policy: str,
        phase: Phase,
        overlap: bool,
        weights: int,
        poison: Poison | None,
        on_killed: Callable[[], None],
        folder: Path | None,
    ) -> None:
        """`folder`: of the engines' pool files."""
        super().__init__(name)
        settings = engine_settings(name, self.address, policy, phase)
        self.runner = MortalRunner(40, 4, 20, None, overlap)
        self.runner.poison, self.runner.weights = poison, weights
        if folder is not None:
            self.runner.keep_blocks(PoolFolder(folder, name, fail))
        self._on_killed = on_killed
        model = replace(checkpoint(), fingerprint=f"{checkpoint().fingerprint}-{weights}")
        self.worker = engine_worker.ringside.worker.Worker(settings, model, self.runner, SILENT)
        if (fetches := self.worker._engine.cache.fetches) is not None:
            fetches._reader = ReaderWithoutThread(network)
        self._network = network
        # Heartbeats have no thread here that could be woken.
        self.worker._heartbeats.send_now = self.worker._heartbeats._send
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._serve()), loop.create_task(self._heartbeat())]

    def drain(self) -> None:
        self.worker.stop()

    def kill(self) -> None:
        if self.alive and self.runner.pool_file is not None:
            self.runner.pool_file.close()
        super().kill()
        self.worker._inbox.close()
        self.worker._context.term()

    async def _serve(self) -> None:
        """The loop of `Worker.serve` in virtual time."""
        worker, random = self.worker, self._network.random
        while not worker._drained():
            await self.gate()
            try:
                stepped = worker._engine.step()
            except Killed:
                self._on_killed()
                return
            for outbox in (worker._outbox, worker._tensors):
                outbox.flush()
                outbox.tick()
            worker._orphans.end()
            worker._announce_quarantine()
            worker._beacon.touch(stepped or not worker._engine.live.requests)
            if stepped:
                await asyncio.sleep(random.uniform(0.005, 0.03))
            elif not worker._mailbox.waiting:
                soon = worker._outbox.waiting or worker._tensors.waiting or worker._quarantined is not None
                await wait_at_most(worker._inbox.arrived, 0.01 if soon else 0.25)
        self.ended = True
        worker._inbox.close()

    async def _heartbeat(self) -> None:
        while not self.ended:
            await self.gate()
            self.worker._heartbeats._send()
            await asyncio.sleep(HEARTBEAT_SECONDS)


class ReaderWithoutThread:
    """Copies at once: a thread would make outcomes depend on the machine. Some copies fail."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._count = 0

    def submit(self, copy: Callable[[list[Target]], list[int | None]], targets: list[Target]) -> Future:
        self._count += 1
        totals = [None] * len(targets) if self._count % FAILING_COPY == 0 else copy(targets)
        self._network.copied += sum(total is not None for total in totals)
        future: Future = Future()
        future.set_result(totals)
        return future

    def shutdown(self, **_: bool) -> None: ...


def fail(reason: str) -> None:
    raise AssertionError(reason)


class SimDetokenizer(Process):
    """The Detokenizer of detok_service, with a vocabulary of partial characters."""

    def __init__(self, network: Network, name: str) -> None:
        super().__init__(name)
        self.inbox = SimInbox(network, self.address, ToDetokenizer)
        loop = asyncio.get_running_loop()
        identity = Identity(name, secrets.randbits(63), self.address, checkpoint().tokenizer_fingerprint)
        decoders = Decoders("bytes", lambda: ByteDecoder(*tables()), lambda: ByteDecoder(*tables()))
        self.service = Detokenizer(
            identity, decoders, lambda address: network.lane(None, address), 1000, SILENT, loop.time
        )
        self.tasks = [loop.create_task(self._serve())]

    def drain(self) -> None:
        self.service.drain()

    def kill(self) -> None:
        super().kill()
        self.inbox.close()

    async def _serve(self) -> None:
        loop, service = asyncio.get_running_loop(), self.service
        while not service.drained(4.0):
            await self.gate()
            service.handle(self.inbox.receive())
            service.tick()
            busy = service.waiting or service.draining_since is not None
            idle = max(0.0, min(service.heartbeat_at - loop.time(), 0.005 if busy else 0.5))
            wait = 0.0 if service.decode_loop.replaying else idle
            await wait_at_most(self.inbox.arrived, wait)
        service.close(0.0)
        self.ended = True
        self.inbox.close()


class SimRouter(Process):
    """The RouterApp of router without its gRPC server: calls go directly to its GenerationService."""

    def __init__(self, network: Network, name: str, engines: tuple[str, ...], detokenizers: tuple[str, ...]) -> None:
        super().__init__(name)
        settings = router_settings(name, self.address, engines, detokenizers)
        self.router = router.app.RouterApp(settings, checkpoint(), SILENT)
        self.generation = GENERATIONS.pop()
        self.calls: dict[asyncio.Task, None] = {}
        self._network = network
        self.tasks = [asyncio.get_running_loop().create_task(self.router.start())]

    def drain(self) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(self._stop()))

    async def _stop(self) -> None:
        await self.router.ring.drain(3.0)
        await asyncio.sleep(0.5)
        self.ended = True
        self._end()

    def kill(self) -> None:
        super().kill()
        for call in list(self.calls):
            call.cancel()
        self._end()

    def _end(self) -> None:
        for task in self.router.tasks:
            task.cancel()
        self.router.ring.dispatcher.close()
        self.router.ring.inbox.close()

    async def stream(self, request, write) -> None:
        """Make a call as gRPC would. Raises RequestError, or CancelledError if the process dies."""
        call = Call(write)
        task = asyncio.ensure_future(self.generation.generate_stream(request, call))
        self.calls[task] = None
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            del self.calls[task]


class Call:
    """The part of a gRPC call that the service uses."""

    caller = Principal()
    peer = "ipv4:127.0.0.1:1"
    traceparent = ""

    def __init__(self, write) -> None:
        self._write = write

    async def write_bytes(self, event: bytes) -> None:
        await self._write(pb.GenerateStreamResponse.FromString(event))


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most `seconds`."""
    if seconds <= 0.0:
        await asyncio.sleep(0)
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
