"""Periodic messages of the ring: who is alive, under which epoch, with what load and what prefix cache."""

from typing import NamedTuple

import msgspec

from sluice.ring.adapters import AdapterNews
from sluice.ring.message import Count, Finite, Message, Name, Number, Total
from sluice.ring.stats import RequestStats, StepStats

# Former epochs remembered per address: a process that was suspended may find late messages of all of them.
MAX_FORMER = 64


class Hello(Message, frozen=True):
    """router → engine, detokenizer, every HELLO_SECONDS: asks for heartbeats to `address` until the hellos stop."""

    router: Name
    address: Name
    cache_known: Total = 0
    """To an engine: number of the latest change of its cache that this router knows; 0: none."""
    epoch: Number = 0
    """Drawn at every start of the process: requests of a former epoch at this address are orphaned."""
    adapters_known: Total = 0
    """As `cache_known`, of its LoRA adapters."""
    prompt_adapters_known: Total = 0
    """As `cache_known`, of its prompt adapters."""


class KeepAlive(Message, frozen=True):
    """engine → detokenizer, and router where it gets tensors, every KEEP_ALIVE_SECONDS, so that the loss of the last
    message before shows as a gap."""

    engine: Name
    engine_epoch: Number


class CacheNews(msgspec.Struct, frozen=True, array_like=True):
    """Changes of an engine's prefix cache, numbered from 1, by block (sluice.ring.hashing.short_hash).

    A router's hellos say how far it has read; the engine reports what came after that, or, if its journal does not
    reach back so far, the whole cache. A block is listed by its last change only: applying a report twice does no harm.
    """

    after: Total
    """Number of the change before the first one here; 0 with `whole`."""
    last: Total
    """Number of the last change here."""
    stored: list[int]
    """Blocks that can be reused now."""
    removed: list[int] = []
    """Blocks that are neither on the device nor on the host any more."""
    whole: bool = False
    """`stored` is the whole cache and replaces what was reported before."""


class EngineHeartbeat(Message, frozen=True):
    """engine → router on the side lane, every HEARTBEAT_SECONDS."""

    engine: Name
    epoch: Number
    """Drawn at every start of the process."""
    address: Name
    fingerprint: Name
    """Of weights, configuration and dtype; the root of block hashes. Streams resume only on an equal one."""
    max_sequence_tokens: Count
    """Longest prompt plus output that this engine can hold."""
    draining: bool
    stats: StepStats
    flushes: list[tuple[Number, Count]] = []
    """(number, blocks freed) of the latest flushes, oldest first."""
    missed: dict[Number, Total] = {}
    """Frames lost on the way to this engine, by the lane's epoch; submits or cancels may be among them."""
    tokenizer: Name = ""
    """Fingerprint of the tokenizer files."""
    steps: list[StepStats] = []
    """Steps since the last heartbeat, or the latest of many; none while idle."""
    requests: list[RequestStats] = []
    """Requests that changed or ended since the last heartbeat."""
    cache: CacheNews | None = None
    """For the router that this heartbeat goes to."""
    max_batch_size: int = 0
    """Sequences in one step at most; 0: unknown."""
    progress: Total = 0
    """Turns of its loop since the start, idle ones included: a step hangs if this does not grow."""
    cut_off: list[Name] = []
    """Addresses of detokenizers whose lanes have accepted nothing for CUT_OFF_SECONDS."""
    quarantine: Number | None = None
    """The request that it runs alone (`Submit.alone`), refusing all others."""
    model_version: Name = ""
    """The operator's label of its model (setting `model_version`), by which a router chooses engines."""
    logits_processors: list[Name] = []
    """Names that requests may ask for."""
    tensors: list[Name] = []
    """Names of tensors that requests may ask for, beside logits."""
    has_adapters: bool = False
    """Whether requests may name LoRA adapters."""
    adapters: AdapterNews | None = None
    """For the router that this heartbeat goes to."""
    cache_events: bool = False
    """Whether it keeps KV cache events, for `ReadCacheEvents`."""
    hidden_size: Count = 0
    """Of the rows of tables that prompts may have; 0: they may have none."""
    prompt_adapters: AdapterNews | None = None
    """For the router that this heartbeat goes to."""
    image_rows: Count = 0
    """Of each image that prompts may have; 0: they may have none."""
    version: Name = ""
    """Of its build."""


class DetokenizerHeartbeat(Message, frozen=True):
    """detokenizer → router on the side lane, every HEARTBEAT_SECONDS."""

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
    """Frames lost on the way from engines, by the engine's epoch."""
    version: Name = ""
    """Of its build."""


class Epochs(NamedTuple):
    """The epochs of the processes that ran at one address, one after the other."""

    latest: int | None = None
    former: tuple[int, ...] = ()

    def is_former(self, epoch: int) -> bool:
        """Whether that process has been replaced: its messages are late."""
        return epoch in self.former

    def replaced_by(self, epoch: int) -> bool:
        """Whether this epoch is a new one, which replaces the latest."""
        return self.latest not in (None, epoch) and epoch not in self.former

    def after(self, epoch: int) -> "Epochs":
        """After a message of this epoch."""
        if self.latest is None:
            return Epochs(epoch)
        # Bounded, because anyone who may send can invent epochs.
        return Epochs(epoch, (*self.former, self.latest)[-MAX_FORMER:]) if self.replaced_by(epoch) else self
