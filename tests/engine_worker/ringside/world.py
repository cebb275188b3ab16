"""A worker on real lanes with a scripted runner, and the inboxes of a router and a detokenizer."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq

from engine_worker.ringside.identity import fingerprint
from engine_worker.ringside.worker import Worker
from sluice.checkpoint.folder import Checkpoint
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.settings.services import EngineSettings
from sluice.wire.calls import CallAnswer
from sluice.wire.heartbeats import EngineHeartbeat, Hello, KeepAlive
from sluice.wire.params import SamplingParams, StopParams, TextParams
from sluice.wire.rows import TokenBatch
from tests.fakes.lanes import connected
from tests.fakes.rows import rows_of
from tests.fakes.runner import ScriptedRunner
from tests.fakes.scripted_tokens import VOCAB
from tests.fakes.submits import submit_of

LIMIT = 60.0
"""Seconds after which a test that waits for something fails."""

CHECKPOINT = Checkpoint(
    path=Path("nowhere"),
    name="scripted",
    config={"vocab_size": VOCAB, "max_position_embeddings": 100},
    generation={},
    tokenizer_config={},
    chat_template=None,
    fingerprint="abc",
)
FINGERPRINT = fingerprint(CHECKPOINT, "checkpoint", "none", ())


class World:
    """A worker in a thread, and the inboxes of a router and a detokenizer that talk to it."""

    def __init__(self, folder: Path, runner: ScriptedRunner, **settings) -> None:
        self.context = zmq.Context()
        self.router = Inbox(self.context, f"ipc://{folder}/router", EngineHeartbeat | CallAnswer)
        self.detokenizer = Inbox(self.context, f"ipc://{folder}/detokenizer", TokenBatch | KeepAlive)
        self.port = settings.get("metrics_port")
        engine_settings = EngineSettings(model="nowhere", id="engine-0", listen=f"ipc://{folder}/engine", **settings)
        self.worker = Worker(engine_settings, CHECKPOINT, runner, structlog.get_logger())
        self.lane = connected(Lane(self.context, self.worker.address))
        self.rows: list = []
        self.opens: list = []
        self.answers: list[CallAnswer] = []
        self.keep_alives = 0
        self.thread = threading.Thread(target=self.worker.serve, daemon=True)
        self.thread.start()

    def submit(self, request: int, prompt: list[int], max_tokens: int = 5, **fields) -> None:
        spec = submit_of(
            request=request,
            attempt=0,
            engine_epoch=self.worker.epoch,
            name=str(request),
            prompt=prompt,
            n=1,
            sampling=SamplingParams(),
            stopping=StopParams(max_tokens=max_tokens),
            text=TextParams(),
            priority=2,
            salt="",
            time_limit=None,
            detokenizer=self.detokenizer.address,
            router=self.router.address,
            **fields,
        )
        assert self.lane.send(spec)

    def hello(self, cache_known: int = 0, epoch: int = 0) -> None:
        assert self.lane.send(Hello("router-0", self.router.address, cache_known, epoch))

    def heartbeats(self, until) -> list[EngineHeartbeat]:
        """Receive heartbeats until one satisfies `until`; returns all of them."""
        end, received = time.monotonic() + LIMIT, []
        while not any(map(until, received)):
            assert time.monotonic() < end
            self.router.wait(0.05)
            for message in self.router.receive():
                (self.answers if isinstance(message, CallAnswer) else received).append(message)
        return received

    def read(self, until) -> None:
        """Receive the detokenizer's messages until `until` is true."""
        end = time.monotonic() + LIMIT
        while not until():
            assert time.monotonic() < end
            self.detokenizer.wait(0.05)
            for message in self.detokenizer.receive():
                if isinstance(message, KeepAlive):
                    self.keep_alives += 1
                else:
                    self.opens += message.opens
                    self.rows += rows_of(message)

    def ends(self) -> list:
        return [row.end for row in self.rows if row.end]

    def close(self) -> None:
        self.worker.stop()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        self.lane.close()
        self.router.close()
        self.detokenizer.close()
        self.context.term()


def stall(
    runner: ScriptedRunner, before_end: Callable[[], None] = lambda: None
) -> tuple[threading.Event, threading.Event]:
    """Block the runner's steps. Returns two events: a step was entered; steps may continue. `before_end` is called at
    the end of each step, in the worker's thread."""
    entered, may_continue = threading.Event(), threading.Event()
    run = runner.run

    def slow(step):
        entered.set()
        may_continue.wait(LIMIT)
        before_end()
        return run(step)

    runner.run = slow
    return entered, may_continue
