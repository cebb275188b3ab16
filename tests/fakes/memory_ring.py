"""A ring in memory for a real dispatcher. Tests decide when its peers compute, lose rows, fail and die."""

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import pack

from msgspec.structs import replace

from router.peers.peers import DetokenizerPeer, EnginePeer, Peer
from sluice.wire.errors import Fault, FinishReason
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat, Phase
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.requests import Cancel, Submit
from sluice.wire.rows import End, Started, TextBatch, TextRow, Times
from sluice.wire.stats import StepStats
from tests.fakes.lanes import FakeLane
from tests.fakes.rows import text_batch
from tests.fakes.submits import extras_of

TIMES = Times(0.1, 0.2, 0.3)


def token_at(prompt: list[int], sequence: int, offset: int) -> int:
    return (prompt[0] * 7 + sequence * 31 + offset * 3) % 1000


def length_of(prompt: list[int], sequence: int) -> int:
    """Number of tokens in the complete output of a sequence."""
    return 1 + (prompt[0] * 5 + sequence * 7) % 12


def prompt_rows(start: int, rows: int) -> bytes:
    """Packed log-probabilities of prompt tokens, without alternatives."""
    return b"".join(pack("<fI", -float(row), row + 1) for row in range(start, start + rows))


def text_of(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


@dataclass
class Run:
    """An attempt that an engine computes."""

    submit: Submit
    at: dict[int, int]
    """Number of output tokens so far, by live sequence."""
    opened: bool = False
    scored: int = 0
    """Number of log-probabilities of the prompt that were sent."""


@dataclass
class MemoryEngine:
    """Handles submits and cancels like an engine; its outputs are functions of prompt, sequence and offset."""

    peer: EnginePeer
    ring: "MemoryRing"
    runs: dict[int, Run] = field(default_factory=dict)
    read: int = 0

    def read_lane(self) -> None:
        """Handle all messages that have arrived."""
        messages = self.peer.lane.messages
        for message in messages[self.read :]:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
        self.read = len(messages)

    def step(self, count: int) -> None:
        """Send `count` tokens of each sequence, or of its prompt's log-probabilities while some are missing."""
        for run in list(self.runs.values()):
            if extras_of(run.submit).prompt_logprobs is not None and run.scored < len(run.submit.prompt) - 1:
                self._score(run, min(count, len(run.submit.prompt) - 1 - run.scored))
                continue
            for sequence, at in list(run.at.items()):
                prompt = run.submit.prompt
                stopping, stop = run.submit.stopping, min(at + count, length_of(prompt, sequence))
                if stopping.hands_over:
                    stop = min(stop, stopping.max_tokens)
                tokens = [token_at(prompt, sequence, offset) for offset in range(at, stop)]
                end = End(FinishReason.EOS, TIMES) if stop == length_of(prompt, sequence) else None
                if end is None and stopping.hands_over:
                    end = End(FinishReason.HANDED_OVER, TIMES)
                self._emit(run, sequence, tokens, end)

    def fail(self, code: str) -> None:
        """Fail all sequences with this error code."""
        for run in list(self.runs.values()):
            for sequence in list(run.at):
                self._emit(run, sequence, [], End(FinishReason.ERROR, TIMES, fault=Fault(code, "injected failure")))

    def _submit(self, submit: Submit) -> None:
        live = self.runs.get(submit.request)
        if live is not None and live.submit.attempt >= submit.attempt:
            return
        if live is not None:
            self._end(live)
        at = {i: len(submit.resume.get(i, ())) for i in range(submit.n) if i not in submit.ended}
        for sequence, tokens in submit.resume.items():
            assert tokens == [token_at(submit.prompt, sequence, offset) for offset in range(len(tokens))]
        self.runs[submit.request] = Run(submit, at)

    def _cancel(self, cancel: Cancel) -> None:
        run = self.runs.get(cancel.request)
        if run is not None and run.submit.attempt == cancel.attempt:
            self._end(run, cancel.sequence)

    def _end(self, run: Run, only: int | None = None) -> None:
        for sequence in [sequence for sequence in run.at if only in (None, sequence)]:
            self._emit(run, sequence, [], End(FinishReason.ABORTED, TIMES))

    def _emit(self, run: Run, sequence: int, tokens: list[int], end: End | None) -> None:
        submit, at = run.submit, run.at[sequence]
        row = TextRow(submit.request, submit.attempt, sequence, at, tokens, [], text_of(tokens), end)
        self._put(run, row)
        run.at[sequence] = at + len(tokens)
        if end is not None:
            del run.at[sequence]
        if not run.at:
            self.runs.pop(submit.request, None)

    def _score(self, run: Run, rows: int) -> None:
        submit = run.submit
        assert not any(submit.resume.values())
        data = prompt_rows(run.scored, rows)
        self._put(run, PromptLogprobs(submit.request, submit.attempt, run.scored, 0, data))
        run.scored += rows

    def _put(self, run: Run, part: TextRow | PromptLogprobs) -> None:
        submit = run.submit
        started = [] if run.opened else [Started(submit.request, submit.attempt, len(submit.prompt), 1)]
        run.opened = True
        self.ring.wires[submit.detokenizer].append((self.peer.epoch, started, part))


class Kind:
    """Peers of one kind, as `router.peers.peers.Peers` shows them."""

    def __init__(self) -> None:
        self.all: list[Peer] = []

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.all if peer.alive]

    @property
    def usable(self) -> list[Peer]:
        return [peer for peer in self.all if peer.usable]


class MemoryRing:
    """Stands in for `router.peers.membership.Membership`, and holds what is on its way to the router."""

    def __init__(self, engines: int, detokenizers: int, phases: Mapping[str, Phase] = {}) -> None:
        """`phases`: of engines, by name; of all others both. All engines are in one group."""
        self._phases = phases
        self.epochs = itertools.count(1)
        self.engines, self.detokenizers = Kind(), Kind()
        self.ready = asyncio.Event()
        self.ready.set()
        self.machines: dict[str, MemoryEngine] = {}
        self.wires: dict[str, deque[tuple[int, list[Started], TextRow | PromptLogprobs]]] = {}
        """By detokenizer: the engine's epoch, and what it sent."""
        for i in range(engines):
            self.start_engine(f"engine-{i}")
        for i in range(detokenizers):
            self.start_detokenizer(f"detok-{i}")

    async def wait(self, deadline: float) -> None:
        await self.ready.wait()

    def start_engine(self, name: str) -> EnginePeer | None:
        """Start a new epoch of an engine. Returns the previous one."""
        stats = StepStats(max_requests=100, tokens_per_kv_block=16)
        epoch = next(self.epochs)
        phase = self._phases.get(name, "both")
        heartbeat = EngineHeartbeat(name, epoch, name, "f", 4096, False, stats, kv_group="g", phase=phase)
        former, peer = self._replace(self.engines, name, heartbeat)
        self.machines[name] = MemoryEngine(peer, self)
        return former

    def start_detokenizer(self, name: str) -> DetokenizerPeer | None:
        """Start a new epoch of a detokenizer. Returns the previous one, whose undelivered rows are lost."""
        epoch = next(self.epochs)
        former, _ = self._replace(self.detokenizers, name, DetokenizerHeartbeat(name, epoch, name, False, 0, 0, 0.0))
        self.wires[name] = deque()
        return former

    def changed(self) -> None:
        """Called when the usability of a peer may have changed."""
        if self.engines.usable and self.detokenizers.usable:
            self.ready.set()
        else:
            self.ready.clear()

    def next_batch(self, name: str, rows: int) -> TextBatch:
        """The next message of a detokenizer, with at most `rows` rows."""
        wire = self.wires[name]
        arrived = [wire.popleft() for _ in range(min(rows, len(wire)))]
        started = [start for _, starts, _ in arrived for start in starts]
        text_rows = [part for _, _, part in arrived if isinstance(part, TextRow)]
        logprobs = [part for _, _, part in arrived if isinstance(part, PromptLogprobs)]
        return replace(text_batch(name, started, text_rows), prompt_logprobs=logprobs)

    def _replace(
        self, kind: Kind, name: str, heartbeat: EngineHeartbeat | DetokenizerHeartbeat
    ) -> tuple[Peer | None, Peer]:
        peer: Peer = Peer(name, frozenset({name}), FakeLane())  # type: ignore[arg-type]
        peer.heartbeat, peer.alive = heartbeat, True
        former = next((peer for peer in kind.all if peer.address == name), None)
        if former is not None:
            former.alive = False
            kind.all.remove(former)
        kind.all.append(peer)
        self.changed()
        return former, peer
