"""Where a request goes: the engine with the least work before its first token, the detokenizer with the fewest streams.

Work is counted in prompt tokens that are not cached there, as the engines' heartbeats report. So the longest cached
prefix wins, unless that engine is clearly more loaded than the least loaded one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import random

from router.peers.prefix_index import Chain, PrefixIndex
from sluice.ring.hashing import block_chain, root_hash, short_hash
from sluice.ring.heartbeats import DetokenizerHeartbeat, EngineHeartbeat

SEQUENCE_WORK = 32
"""What a running sequence costs a newcomer, in prompt tokens: a step is shared with it."""
SPREAD_FACTOR = 1.5
SPREAD_SLACK = 8
"""More sequences than SPREAD_FACTOR × the least loaded engine's + SPREAD_SLACK: it gets nothing, cached or not."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Peers by the epochs of their heartbeats, and what the request was charged there."""

    engine: int
    detokenizer: int
    sequences: int
    uncached_tokens: int
    chain: Chain


@dataclass(slots=True)
class _EngineLoad:
    cache: PrefixIndex
    requests: int = 0
    sequences: int = 0
    context_tokens: int = 0
    """Of own requests without a first token."""
    others: int = 0
    """Requests of other routers, at the last heartbeat."""

    @property
    def all_sequences(self) -> int:
        return self.sequences + self.others

    @property
    def work(self) -> int:
        return self.context_tokens + SEQUENCE_WORK * self.all_sequences


@dataclass(slots=True)
class _DetokenizerLoad:
    streams: int = 0
    others: int = 0

    @property
    def all_streams(self) -> int:
        return self.streams + self.others


class Placement:
    """This router's own load on each peer, what the heartbeats say about others', and which prefixes lie where."""

    def __init__(self, cached_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`cached_blocks` are remembered per engine."""
        self._cached_blocks = cached_blocks
        self._clock = clock
        self._engines: dict[int, _EngineLoad] = {}
        self._detokenizers: dict[int, _DetokenizerLoad] = {}

    def hear_engine(self, heartbeat: EngineHeartbeat) -> None:
        """Requests that the engine reports beyond our own belong to other routers. `catch_up` handles cache events."""
        load = self._engine(heartbeat.epoch)
        load.others = max(0, heartbeat.stats.active_requests - load.requests)
        if heartbeat.cache is not None:
            load.cache.hear(heartbeat.cache)

    def catch_up(self) -> bool:
        """Apply a part of the cache news that were heard; tells whether there may be more."""
        behind = next((load.cache for load in self._engines.values() if load.cache.behind), None)
        if behind is not None:
            behind.work()
        return behind is not None

    def cache_heard(self, epoch: int) -> int:
        """Number of the latest change of that engine's cache that is applied here; 0: none."""
        return self._engines[epoch].cache.heard if epoch in self._engines else 0

    def requests(self, epoch: int) -> int:
        """That this engine holds, of all routers."""
        load = self._engine(epoch)
        return load.requests + load.others

    def hear_detokenizer(self, heartbeat: DetokenizerHeartbeat) -> None:
        """The same for streams."""
        load = self._detokenizer(heartbeat.epoch)
        load.others = max(0, heartbeat.streams - load.streams)

    def forget(self, epoch: int) -> None:
        """That incarnation has gone, and its cache with it."""
        self._engines.pop(epoch, None)
        self._detokenizers.pop(epoch, None)

    def forget_cache(self, epoch: int) -> None:
        """That engine dropped its prefix cache."""
        self._engine(epoch).cache.flush()

    def choose(
        self,
        engines: Sequence[EngineHeartbeat],
        detokenizers: Sequence[DetokenizerHeartbeat],
        prompt: Sequence[int],
        salt: str,
        sequences: int,
    ) -> Choice:
        """Pick from at least one of each, at random among equals. Charges nothing.

        Each engine reaches some of the detokenizers; one that it reaches is picked.
        """
        loads = [(self._engine(heartbeat.epoch), heartbeat) for heartbeat in engines]
        limit = min(load.all_sequences for load, _ in loads) * SPREAD_FACTOR + SPREAD_SLACK
        loads = [(load, heartbeat) for load, heartbeat in loads if load.all_sequences <= limit]
        engine, uncached, chain = self._least_work(loads, prompt, salt)
        reached = [heartbeat for heartbeat in detokenizers if heartbeat.address not in engine.cut_off]
        return Choice(engine.epoch, self._fewest_streams(reached), sequences, uncached, chain)

    def charge(self, choice: Choice) -> None:
        """The request was submitted there: its blocks will be cached, its work is ahead."""
        engine = self._engine(choice.engine)
        engine.requests += 1
        engine.sequences += choice.sequences
        engine.context_tokens += choice.uncached_tokens
        engine.cache.expect(choice.chain)
        self._detokenizer(choice.detokenizer).streams += choice.sequences

    def begun(self, choice: Choice) -> None:
        """Its first token has come: the prompt's work is done. Call it at most once, before `release`."""
        if choice.engine in self._engines:
            engine = self._engines[choice.engine]
            engine.context_tokens -= choice.uncached_tokens
            engine.cache.computed(choice.chain, self._clock())

    def release(self, choice: Choice, begun: bool) -> None:
        """It has ended, or its peer was lost."""
        if choice.engine in self._engines:
            engine = self._engines[choice.engine]
            engine.requests -= 1
            engine.sequences -= choice.sequences
            if not begun:
                engine.context_tokens -= choice.uncached_tokens
                engine.cache.drop(choice.chain)
        if choice.detokenizer in self._detokenizers:
            self._detokenizers[choice.detokenizer].streams -= choice.sequences

    def _least_work(
        self, loads: list[tuple[_EngineLoad, EngineHeartbeat]], prompt: Sequence[int], salt: str
    ) -> tuple[EngineHeartbeat, int, Chain]:
        """The engine that will be through with the prompt first; its uncached tokens, the prompt's blocks."""
        now = self._clock()
        chains: dict[tuple[str, int], Chain] = {}
        order = sorted(((load.work, random(), load, heartbeat) for load, heartbeat in loads), key=itemgetter(0, 1))
        least = order[0][0] + len(prompt) + 1
        for work, _, load, heartbeat in order:
            size = max(1, heartbeat.stats.tokens_per_kv_block)
            chain = chains.get(kind := (heartbeat.fingerprint, size))
            if chain is None:
                chain = chains[kind] = _chain(heartbeat, prompt, salt)
            needed = max(0, (work + len(prompt) - least) // size + 1)
            uncached = len(prompt) - load.cache.prefix(chain, now, needed) * size
            if work + uncached < least:
                least = work + uncached
                best = heartbeat, uncached, chain
        return best

    def _fewest_streams(self, detokenizers: Sequence[DetokenizerHeartbeat]) -> int:
        return min(
            (self._detokenizer(heartbeat.epoch).all_streams, random(), heartbeat.epoch) for heartbeat in detokenizers
        )[2]

    def _engine(self, epoch: int) -> _EngineLoad:
        if epoch not in self._engines:
            self._engines[epoch] = _EngineLoad(PrefixIndex(self._cached_blocks))
        return self._engines[epoch]

    def _detokenizer(self, epoch: int) -> _DetokenizerLoad:
        return self._detokenizers.setdefault(epoch, _DetokenizerLoad())


def _chain(heartbeat: EngineHeartbeat, prompt: Sequence[int], salt: str) -> Chain:
    size = heartbeat.stats.tokens_per_kv_block
    if size < 1:
        return ()
    return tuple(map(short_hash, block_chain(root_hash(heartbeat.fingerprint, salt), prompt, size)))
