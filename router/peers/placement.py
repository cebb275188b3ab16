"""Places requests on the engine with the least work before the first token, and the detokenizer with fewest streams.

Work is measured in uncached prompt tokens. So the engine with the longest cached prefix is chosen, unless it is clearly
more loaded than the least loaded engine. Blocks that an engine can copy from another one of its group count a tenth.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from random import random

from router.peers.keepers import keepers_for
from router.peers.kv_groups import NOT_COMPUTED, NOWHERE, Computed, GroupCopies, KvSite, LostCaches
from router.peers.prefix_index import Chain, PrefixIndex
from sluice.wire.hashing import Domain, block_chain, root_hash, short_hash
from sluice.wire.heartbeats import DetokenizerHeartbeat, EngineHeartbeat
from sluice.wire.tables import VirtualTokens

SEQUENCE_WORK = 32
"""Delay that a running sequence causes for a new request with which it shares steps, in prompt tokens."""
SPREAD_FACTOR = 1.5
SPREAD_SLACK = 8
"""An engine with more sequences than SPREAD_FACTOR × those of the least loaded engine + SPREAD_SLACK gets no new
request, even if it has the prefix cached."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The peers chosen for a request, and the load that the request adds to them."""

    engine: int
    """Epoch of the engine."""
    detokenizer: int
    """Epoch of the detokenizer."""
    sequences: int
    uncached_tokens: int
    """Tokens that the engine must compute before the next one; copied tokens count a tenth."""
    chain: Chain
    keepers: tuple[str, ...] = ()
    """Keepers of other machines that the engine should ask for blocks."""


@dataclass(slots=True)
class _EngineLoad:
    cache: PrefixIndex
    site: KvSite = NOWHERE
    requests: int = 0
    sequences: int = 0
    context_tokens: int = 0
    """Uncached prompt tokens of this router's requests that have no output token yet."""
    others: int = 0
    """Requests of other routers at the last heartbeat."""

    @property
    def all_sequences(self) -> int:
        return self.sequences + self.others

    @property
    def work(self) -> int:
        return self.context_tokens + SEQUENCE_WORK * self.all_sequences


@dataclass(eq=False)
class Placement:
    """The load of each peer, by this router and, according to heartbeats, by others; and the prefixes that each engine
    has cached."""

    _cached_blocks: int
    """Capacity of the prefix index, per engine."""
    _clock: Callable[[], float] = time.monotonic
    _engines: dict[int, _EngineLoad] = field(default_factory=dict)
    _streams: Counter[int] = field(default_factory=Counter)
    """Streams of this router, by the detokenizer's epoch."""
    _other_streams: Counter[int] = field(default_factory=Counter)
    """Streams of other routers at the last heartbeat, by the detokenizer's epoch."""
    _lost: LostCaches = field(init=False)

    def __post_init__(self) -> None:
        self._lost = LostCaches(self._clock)

    def on_engine_heartbeat(self, heartbeat: EngineHeartbeat) -> None:
        """Update the engine's load. `update_cache` then applies the reported changes of its cache."""
        load = self._engine(heartbeat.epoch)
        load.site = KvSite.of(heartbeat)
        # Requests beyond our own belong to other routers.
        load.others = max(0, heartbeat.stats.active_requests - load.requests)
        if heartbeat.cache is not None:
            load.cache.begin_update(heartbeat.cache)

    def update_cache(self) -> bool:
        """Apply one slice of the reported cache changes. False if there was nothing to apply."""
        return any(load.cache.continue_update() for load in self._engines.values())

    def cache_version(self, epoch: int) -> int:
        """Number of the latest change of the engine's cache that was applied here; 0 if none was."""
        return self._engines[epoch].cache.version if epoch in self._engines else 0

    def requests(self, epoch: int) -> int:
        """Requests of all routers on this engine."""
        load = self._engine(epoch)
        return load.requests + load.others

    def on_detokenizer_heartbeat(self, heartbeat: DetokenizerHeartbeat) -> None:
        self._other_streams[heartbeat.epoch] = max(0, heartbeat.streams - self._streams[heartbeat.epoch])

    def forget(self, epoch: int) -> None:
        load = self._engines.pop(epoch, None)
        if load is not None:
            self._lost.keep(epoch, load.site, load.cache)
        self._streams.pop(epoch, None)
        self._other_streams.pop(epoch, None)

    def forget_cache(self, epoch: int) -> None:
        self._engine(epoch).cache.flush()

    def forget_lost_caches(self) -> None:
        self._lost.clear()

    def choose(
        self,
        engines: Sequence[EngineHeartbeat],
        detokenizers: Sequence[DetokenizerHeartbeat],
        prompt: Sequence[int],
        domain: Domain,
        sequences: int,
        virtual: VirtualTokens | None = None,
        computed: Computed = NOT_COMPUTED,
    ) -> Choice:
        """Choose an engine, and a detokenizer that it reaches, at random among equals. Does not charge them.

        Neither list may be empty, and each engine must reach at least one of the detokenizers. `virtual`: virtual
        tokens of the prompt. `computed`: what earlier attempts have computed.
        """
        loads = [(self._engine(heartbeat.epoch), heartbeat) for heartbeat in engines]
        # A popular prefix must not attract every request to the engine that has it cached.
        limit = min(load.all_sequences for load, _ in loads) * SPREAD_FACTOR + SPREAD_SLACK
        loads = [(load, heartbeat) for load, heartbeat in loads if load.all_sequences <= limit]
        engine, uncached, chain = self._least_work(loads, prompt, domain, virtual, computed)
        reached = [heartbeat.epoch for heartbeat in detokenizers if heartbeat.address not in engine.cut_off]
        keepers: tuple[str, ...] = ()
        if engine.kv_keeper:
            size = engine.stats.tokens_per_kv_block
            keepers = keepers_for(KvSite.of(engine), computed.site, self._caches(), chain, size)
        return Choice(engine.epoch, self._fewest_streams(reached), sequences, uncached, chain, keepers)

    def charge(self, choice: Choice) -> None:
        """Count a submitted request, and expect its blocks in the engine's cache."""
        engine = self._engine(choice.engine)
        engine.requests += 1
        engine.sequences += choice.sequences
        engine.context_tokens += choice.uncached_tokens
        engine.cache.expect(choice.chain)
        self._streams[choice.detokenizer] += choice.sequences

    def on_first_token(self, choice: Choice) -> None:
        """The prompt has been computed. Called at most once per request, before `release`."""
        if choice.engine in self._engines:
            engine = self._engines[choice.engine]
            engine.context_tokens -= choice.uncached_tokens
            engine.cache.on_computed(choice.chain, self._clock())

    def release(self, choice: Choice, begun: bool) -> None:
        """The request has ended, or its peer was lost. `begun`: the request had its first token."""
        if choice.engine in self._engines:
            engine = self._engines[choice.engine]
            engine.requests -= 1
            engine.sequences -= choice.sequences
            if not begun:
                engine.context_tokens -= choice.uncached_tokens
                engine.cache.drop(choice.chain)
        if choice.detokenizer in self._streams:
            self._streams[choice.detokenizer] -= choice.sequences

    def _least_work(
        self,
        loads: list[tuple[_EngineLoad, EngineHeartbeat]],
        prompt: Sequence[int],
        domain: Domain,
        virtual: VirtualTokens | None,
        computed: Computed,
    ) -> tuple[EngineHeartbeat, int, Chain]:
        """(the engine that will continue first, the tokens that it must compute, the prompt's block hashes)."""
        now = self._clock()
        chains: dict[tuple[str, int], Chain] = {}
        copies = GroupCopies(len(prompt), computed, self._group_caches)
        order = sorted(((load.work, random(), load, heartbeat) for load, heartbeat in loads), key=itemgetter(0, 1))
        least = order[0][0] + len(prompt) + computed.output_tokens + 1
        for work, _, load, heartbeat in order:
            size = max(1, heartbeat.stats.tokens_per_kv_block)
            chain = chains.get(kind := (heartbeat.fingerprint, size))
            if chain is None:
                chain = chains[kind] = _chain(heartbeat, prompt, domain, virtual)
            # Number of blocks that must be cached on this engine for it to beat the best engine so far.
            if heartbeat.kv_group or computed.site.group:
                missing = copies.missing(heartbeat, chain)
                needed = -(-missing.cached_for(least - work) // size)
                uncached = missing.tokens(load.cache.prefix(chain, now, needed) * size)
            else:
                needed = max(0, (work + len(prompt) - least) // size + 1)
                uncached = len(prompt) - load.cache.prefix(chain, now, needed) * size
            if work + uncached < least:
                least = work + uncached
                best = heartbeat, uncached, chain
        return best

    def _group_caches(self, group: str) -> list[PrefixIndex]:
        return [cache for site, cache in self._caches() if site.group == group]

    def _caches(self) -> list[tuple[KvSite, PrefixIndex]]:
        """Of living engines, and of recently lost ones."""
        return [(load.site, load.cache) for load in self._engines.values()] + self._lost.all()

    def _fewest_streams(self, epochs: Iterable[int]) -> int:
        return min((self._streams[epoch] + self._other_streams[epoch], random(), epoch) for epoch in epochs)[2]

    def _engine(self, epoch: int) -> _EngineLoad:
        if epoch not in self._engines:
            self._engines[epoch] = _EngineLoad(PrefixIndex(self._cached_blocks))
            self._lost.drop(epoch)
        return self._engines[epoch]


def _chain(heartbeat: EngineHeartbeat, prompt: Sequence[int], domain: Domain, virtual: VirtualTokens | None) -> Chain:
    size = heartbeat.stats.tokens_per_kv_block
    if size < 1:
        return ()
    key = None if virtual is None else virtual.key
    return tuple(map(short_hash, block_chain(root_hash(heartbeat.fingerprint, *domain), prompt, size, key)))
