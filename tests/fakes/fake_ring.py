"""A ring of fake engines and fake detokenizers, to which real routers connect."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import zmq

from router.ring_side import RouterInbox
from sluice.wire.requests import Cancel
from tests.fakes.ring_peers import FakeDetokenizer, FakeEngine
from tests.fakes.ring_scripts import Call, Script, generate


class FakeRing:
    """Any number of engines and detokenizers, whose sockets are in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.context: zmq.Context = zmq.Context()
        self.engines: dict[str, FakeEngine] = {}
        self.detokenizers: dict[str, FakeDetokenizer] = {}
        self.script: Script = generate
        self.inboxes: list[RouterInbox] = []
        """Inboxes of the routers that were started."""
        self.patient = True
        """Whether routers wait for peers that are only late; see `lose_only_the_silent` in tests/router/conftest.py."""
        self.tasks: set[asyncio.Task] = set()

    def soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background until the ring is closed."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def until_read(self) -> None:
        """Wait until the routers have read everything that was sent to them.

        Without this, a later message from one peer may overtake an earlier one from another: lanes are independent.
        """
        peers = (*self.engines.values(), *self.detokenizers.values())
        for inbox in self.inboxes:
            sent = {lane.epoch: lane.sent for peer in peers if (lane := peer.lanes.get(inbox.address))}
            while inbox._loop is not None and any(inbox._expected.get(lane, 0) < count for lane, count in sent.items()):
                await asyncio.sleep(0.001)

    def add_engine(self, name: str = "engine") -> FakeEngine:
        engine = FakeEngine(self, name)
        self.engines[engine.address] = engine
        return engine

    def add_detokenizer(self, name: str = "detok") -> FakeDetokenizer:
        detokenizer = FakeDetokenizer(self, name)
        self.detokenizers[detokenizer.address] = detokenizer
        return detokenizer

    def beats(self, address: str) -> bool:
        """Whether routers should wait for the heartbeats of this peer, because they will arrive."""
        peer = self.engines.get(address) or self.detokenizers.get(address)
        return self.patient and peer is not None and peer.beating

    def moves(self, address: str) -> bool:
        """Whether those heartbeats report progress."""
        return self.beats(address) and address in self.engines and bool(self.engines[address].moving)

    @property
    def calls(self) -> list[Call]:
        return [call for engine in self.engines.values() for call in engine.calls]

    @property
    def cancels(self) -> list[Cancel]:
        return [cancel for engine in self.engines.values() for cancel in engine.cancels]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for peer in (*self.engines.values(), *self.detokenizers.values()):
            await peer.close()
        self.context.term()
