"""Signs of life on the ring: who is there, how it is doing, and what its prefix cache holds."""

import msgspec

from sluice.ring.bounds import Count, Finite, Name, Number, Total
from sluice.ring.message import Message
from sluice.ring.stats import RequestStats, StepStats


class Hello(Message, frozen=True):
    """router → engine, detokenizer, every second: heartbeats go to `address` until the hellos stop."""

    router: Name
    address: Name
    cache_heard: Total = 0
    """To an engine: number of the latest change of its cache that this router knows; 0: none."""
    epoch: Number = 0
    """Drawn at every start of the process: nobody waits any more for what a former one at this address asked for."""


class KeepAlive(Message, frozen=True):
    """engine → detokenizer, every second: the engine lives, and a lost last message shows as a gap."""

    engine: Name
    engine_epoch: Number


class CacheNews(msgspec.Struct, frozen=True, array_like=True):
    """What changed in an engine's prefix cache, by block (sluice.ring.hashing.short_hash).

    Changes are numbered from 1. A router says in its hellos how far it has heard; the engine tells what came after
    that, or, where its journal does not reach back so far, all that is findable now. A block that changed more than
    once stands where its last change put it, so that what was heard before can be heard again.
    """

    after: Total
    """Number of the change that this follows; 0 with `whole`."""
    last: Total
    """Number of the latest change told."""
    stored: list[int]
    """Findable now."""
    removed: list[int] = []
    """Gone: from the device and from the host."""
    whole: bool = False
    """Forget what was heard before: `stored` is everything."""


class EngineHeartbeat(Message, frozen=True):
    """engine → router on the side lane, every half second."""

    engine: Name
    epoch: Number
    """Drawn at every start of the process."""
    address: Name
    fingerprint: Name
    """Of weights, configuration and dtype; the root of block hashes. A stream goes on where it is the same."""
    max_sequence_tokens: Count
    """Longest prompt plus output that this engine can hold."""
    draining: bool
    stats: StepStats
    flushes: list[tuple[Number, Count]] = []
    """(number, blocks freed) of the latest flushes, oldest first."""
    missed: dict[Number, Total] = {}
    """Frames that never came, by the epoch of their lane: submits or cancels among them. Only lanes with losses."""
    tokenizer: Name = ""
    """Fingerprint of the tokenizer files."""
    steps: list[StepStats] = []
    """Steps since the last heartbeat, the latest where they were many; none while idle."""
    requests: list[RequestStats] = []
    """Requests that ended since the last heartbeat, and those that live, as far as they changed."""
    cache: CacheNews | None = None
    """For the router that gets this heartbeat."""
    max_batch_size: int = 0
    """Sequences that it computes at once; 0: it does not tell."""
    progress: Total = 0
    """Turns of its loop since the start, idle ones too: where this stands still, a step hangs."""
    cut_off: list[Name] = []
    """Addresses of detokenizers to which nothing has got for long: its lanes to them are full."""
    quarantine: Number | None = None
    """The request that it runs alone (`Submit.alone`): it refuses all others."""


class DetokenizerHeartbeat(Message, frozen=True):
    """detokenizer → router on the side lane, every half second."""

    detokenizer: Name
    epoch: Number
    address: Name
    draining: bool
    streams: Count
    queue_depth: Count
    tokens_per_second: Finite
    tokenizer: Name = ""
    """Fingerprint of the tokenizer files."""
    missed: dict[Number, Total] = {}
    """Frames of engines that never came, by the engine's epoch. Only engines with losses."""
