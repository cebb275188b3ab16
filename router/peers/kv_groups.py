"""What the engines of a group can copy from each other: blocks of living engines, and of recently lost ones."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from router.peers.prefix_index import Chain, PrefixIndex
from sluice.wire.heartbeats import EngineHeartbeat

LOST_SECONDS = 60.0
"""Time for which the blocks of a lost engine count as copyable. By then it has restarted and reports them itself."""
MAX_LOST = 8
"""Lost engines that are remembered, the latest ones."""
COPIED_PER_COMPUTED = 10
"""Tokens that an engine copies in the time in which it computes one."""


class KvSite(NamedTuple):
    """Where an engine keeps its blocks: this determines who can copy them. All fields are empty if no engine can."""

    group: str = ""
    keeper: str = ""
    layout: str = ""
    """See `EngineHeartbeat`."""

    @classmethod
    def of(cls, heartbeat: EngineHeartbeat) -> "KvSite":
        return cls(heartbeat.kv_group, heartbeat.kv_keeper, heartbeat.kv_layout)


NOWHERE = KvSite()


class Computed(NamedTuple):
    """What earlier attempts of a request have computed: the prompt and some output, all of it on one machine."""

    site: KvSite = NOWHERE
    """Of the engine that did."""
    output_tokens: int = 0


NOT_COMPUTED = Computed()


class _Lost(NamedTuple):
    site: KvSite
    until: float
    cache: PrefixIndex


@dataclass(eq=False)
class LostCaches:
    """The prefix caches of lost engines: their files outlive them, for a while."""

    _clock: Callable[[], float] = time.monotonic
    _lost: OrderedDict[int, _Lost] = field(default_factory=OrderedDict)
    """By the engine's epoch, in order of their loss."""

    def keep(self, epoch: int, site: KvSite, cache: PrefixIndex) -> None:
        """An engine was lost. Its cache is kept only if other engines can copy its blocks."""
        if site != NOWHERE:
            self._lost[epoch] = _Lost(site, self._clock() + LOST_SECONDS, cache)
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)

    def drop(self, epoch: int) -> None:
        """The engine has returned, and reports its cache itself."""
        self._lost.pop(epoch, None)

    def clear(self) -> None:
        """All prefix caches are flushed."""
        self._lost.clear()

    def all(self) -> list[tuple[KvSite, PrefixIndex]]:
        now = self._clock()
        while self._lost and next(iter(self._lost.values())).until <= now:
            self._lost.popitem(last=False)
        return [(lost.site, lost.cache) for lost in self._lost.values()]


class Missing(NamedTuple):
    """Tokens that an engine needs before it can sample the next one, as far as it has not cached them itself."""

    computed: int
    """To be computed."""
    copied: int
    """To be copied from its group: leading tokens of the prompt."""

    def tokens(self, cached: int) -> int:
        """The work with this many leading tokens cached, in tokens to compute."""
        if cached > self.copied:
            return self.computed - (cached - self.copied)
        return self.computed + -(-(self.copied - cached) // COPIED_PER_COMPUTED)

    def cached_for(self, limit: int) -> int:
        """Number of leading tokens that must be cached for `tokens` to be less than `limit`."""
        if self.computed < limit:
            return max(0, self.copied - COPIED_PER_COMPUTED * (limit - self.computed - 1))
        return self.copied + self.computed - limit + 1


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """What engines can copy for one request. A ring without groups does not use it."""

    prompt_tokens: int
    computed: Computed
    caches_of: Callable[[str], list[PrefixIndex]]
    """The caches of a group."""
    _copied: dict[tuple[str, Chain], int] = field(default_factory=dict)
    """Leading blocks that a group has, by group and hashes of the prompt's blocks."""

    def missing(self, heartbeat: EngineHeartbeat, chain: Chain) -> Missing:
        group, later = heartbeat.kv_group, self.computed.output_tokens if self.computed.site.group else 0
        if not group:
            return Missing(self.prompt_tokens + later, 0)
        if group == self.computed.site.group:
            blocks, later = len(chain), -(-later // COPIED_PER_COMPUTED)
        else:
            if (group, chain) not in self._copied:
                self._copied[group, chain] = _copyable(chain, self.caches_of(group))
            blocks = self._copied[group, chain]
        copied = blocks * heartbeat.stats.tokens_per_kv_block
        return Missing(self.prompt_tokens - copied + later, copied)


def _copyable(chain: Chain, caches: Collection[PrefixIndex]) -> int:
    """Number of leading blocks of which each is in at least one of the caches."""
    blocks, previous = 0, -1
    while blocks > previous:
        previous = blocks
        for cache in caches:
            blocks += cache.num_reported(chain, blocks)
    return blocks
