"""Where a request goes: the engine with the least work before its first token, the detokenizer with the fewest streams.

Work is counted in prompt tokens. What was placed on an engine before is taken to be cached there: the hashes of its
blocks (sluice.ring.hashing) are kept in a bounded LRU per engine. So the longest shared prefix wins, unless that engine
is clearly more loaded than the least loaded one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.ring.hashing import block_chain, rendezvous, root_hash
from sluice.ring.wire import DetokenizerBeat, EngineBeat

SEQUENCE_WORK = 32
"""What a running sequence costs a newcomer, in prompt tokens: a step is shared with it."""
SPREAD_FACTOR = 1.5
SPREAD_SLACK = 8
"""More sequences than SPREAD_FACTOR × the least loaded engine's + SPREAD_SLACK: it gets nothing, cached or not."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Peers by the epochs of their beats, and what the request was charged there."""

    engine: int
    detokenizer: int
    sequences: int
    uncached_tokens: int
    chain: tuple[bytes, ...]


@dataclass(slots=True)
class _EngineLoad:
    requests: int = 0
    sequences: int = 0
    context_tokens: int = 0
    """Of own requests without a first token."""
    others: int = 0
    """Requests of other routers, at the last beat."""
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

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
    """This router's own load on each peer, what the beats say about others', and which prefixes lie where."""

    def __init__(self, cached_blocks: int) -> None:
        self._cached_blocks = cached_blocks
        self._engines: dict[int, _EngineLoad] = {}
        self._detokenizers: dict[int, _DetokenizerLoad] = {}

    def hear_engine(self, beat: EngineBeat) -> None:
        """A beat tells how many requests the engine holds; what is not ours is others'."""
        load = self._engine(beat.epoch)
        load.others = max(0, beat.stats.active_requests - load.requests)

    def hear_detokenizer(self, beat: DetokenizerBeat) -> None:
        """The same for streams."""
        load = self._detokenizer(beat.epoch)
        load.others = max(0, beat.streams - load.streams)

    def forget(self, epoch: int) -> None:
        """That incarnation has gone, and its cache with it."""
        self._engines.pop(epoch, None)
        self._detokenizers.pop(epoch, None)

    def forget_cache(self, epoch: int) -> None:
        """That engine dropped its prefix cache."""
        self._engine(epoch).cached.clear()

    def choose(
        self,
        engines: Sequence[EngineBeat],
        detokenizers: Sequence[DetokenizerBeat],
        prompt: Sequence[int],
        salt: str,
        sequences: int,
        key: str,
    ) -> Choice:
        """Pick from at least one of each; `key` breaks ties. Charges nothing."""
        fewest = min(self._engine(beat.epoch).all_sequences for beat in engines)
        limit = fewest * SPREAD_FACTOR + SPREAD_SLACK
        chains: dict[tuple[str, int], tuple[bytes, ...]] = {}
        found: list[tuple[int, int, EngineBeat, tuple[bytes, ...]]] = []
        for beat in engines:
            load = self._engine(beat.epoch)
            if load.all_sequences > limit:
                continue
            chain = chains.get(kind := (beat.fingerprint, beat.stats.tokens_per_kv_block))
            if chain is None:
                chain = chains[kind] = _chain(beat, prompt, salt)
            uncached = len(prompt) - _cached_prefix(load.cached, chain) * beat.stats.tokens_per_kv_block
            found.append((load.work + uncached, uncached, beat, chain))
        least = min(work for work, *_ in found)
        ties = {str(beat.epoch): (uncached, beat, chain) for work, uncached, beat, chain in found if work == least}
        uncached, engine, chain = ties[rendezvous(key, ties)[0]]
        return Choice(engine.epoch, self._fewest_streams(detokenizers, key), sequences, uncached, chain)

    def charge(self, choice: Choice) -> None:
        """The request was submitted there: its blocks will be cached, its work is ahead."""
        engine = self._engine(choice.engine)
        engine.requests += 1
        engine.sequences += choice.sequences
        engine.context_tokens += choice.uncached_tokens
        # The root block last: the ends of chains are forgotten first.
        for block in reversed(choice.chain):
            engine.cached[block] = None
            engine.cached.move_to_end(block)
        while len(engine.cached) > self._cached_blocks:
            engine.cached.popitem(last=False)
        self._detokenizer(choice.detokenizer).streams += choice.sequences

    def begun(self, choice: Choice) -> None:
        """Its first token has come: the prompt's work is done. Call it at most once, before `release`."""
        if choice.engine in self._engines:
            self._engines[choice.engine].context_tokens -= choice.uncached_tokens

    def release(self, choice: Choice, begun: bool) -> None:
        """It has ended, or its peer was lost."""
        if choice.engine in self._engines:
            engine = self._engines[choice.engine]
            engine.requests -= 1
            engine.sequences -= choice.sequences
            engine.context_tokens -= 0 if begun else choice.uncached_tokens
        if choice.detokenizer in self._detokenizers:
            self._detokenizers[choice.detokenizer].streams -= choice.sequences

    def _fewest_streams(self, detokenizers: Sequence[DetokenizerBeat], key: str) -> int:
        loads = {beat.epoch: self._detokenizer(beat.epoch).all_streams for beat in detokenizers}
        fewest = min(loads.values())
        return int(rendezvous(key, [str(epoch) for epoch, streams in loads.items() if streams == fewest])[0])

    def _engine(self, epoch: int) -> _EngineLoad:
        return self._engines.setdefault(epoch, _EngineLoad())

    def _detokenizer(self, epoch: int) -> _DetokenizerLoad:
        return self._detokenizers.setdefault(epoch, _DetokenizerLoad())


def _chain(beat: EngineBeat, prompt: Sequence[int], salt: str) -> tuple[bytes, ...]:
    size = beat.stats.tokens_per_kv_block
    return tuple(block_chain(root_hash(beat.fingerprint, salt), prompt, size)) if size > 0 else ()


def _cached_prefix(cached: OrderedDict[bytes, None], chain: Sequence[bytes]) -> int:
    for blocks, block in enumerate(chain):
        if block not in cached:
            return blocks
    return len(chain)
