"""Periodic messages of the ring, by which services report their epoch, load and prefix cache."""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sluice.wire.adapters import AdapterChanges
from sluice.wire.message import Count, Finite, Message, Name, Number, Total
from sluice.wire.offers import Offer
from sluice.wire.stats import RequestProgress, StepStats

MAX_FORMER = 64
"""Former epochs remembered per address. A process that was suspended may receive late messages of all of them."""
MAX_BLOCKS = 1 << 22
MAX_STATS = 1 << 16
"""Statistics of a heartbeat. A few bytes of a frame decode to a quarter of a kilobyte each."""
MAX_LISTED = 1 << 12
"""Maximum length of the lists of an engine's heartbeat."""
Phase = Literal["both", "prefill", "decode"]
"""The part of requests that an engine prefers to compute: prefill the prompt and the first token, decode the rest."""
Missed = Annotated[dict[Number, Total], Meta(max_length=1 << 13)]
"""Lost frames by the epoch of what sent them. Detokenizers remember 4096 engines, and as many for each router."""


class Hello(Message, frozen=True):
    """router → engine, detokenizer, every HELLO_SECONDS: requests heartbeats to `address` until the hellos stop."""

    router: Name
    address: Name
    cache_known: Total = 0
    """To an engine: number of the latest change of its cache that this router knows. 0: none."""
    epoch: Number = 0
    """Random, new at every start of the process. Requests of a former epoch at this address are orphaned."""
    adapters_known: Total = 0
    """Like `cache_known`, for the engine's LoRA adapters."""
    prompt_adapters_known: Total = 0
    """Like `cache_known`, for the engine's prompt adapters."""
    challenge: Number = 0
    """Random, known only to the process that receives this hello. Its heartbeats repeat it, which proves that they come
    from the address that they name: the holder of a key cannot report for other peers."""


class KeepAlive(Message, frozen=True):
    """engine → detokenizer, and → router if that receives tensors, every KEEP_ALIVE_SECONDS.

    If the message before it was lost, the keep-alive reveals the gap.
    """

    engine: Name
    engine_epoch: Number


class CacheChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of an engine's prefix cache, numbered from 1, by block (sluice.wire.hashing.short_hash).

    A router's hellos contain the number of the last change that it knows. The engine reports later changes, or the
    whole cache if its journal no longer contains all of them. Only the last change of each block is listed, so applying
    a report twice is harmless.
    """

    after: Total
    """Number of the change before the first one in this report. 0 with `whole`."""
    last: Total
    """Number of the last change in this report."""
    stored: Annotated[list[int], Meta(max_length=MAX_BLOCKS)]
    """Blocks that can be reused now."""
    removed: Annotated[list[int], Meta(max_length=MAX_BLOCKS)] = []
    """Blocks that are no longer on the device or the host."""
    whole: bool = False
    """Whether `stored` is the whole cache, which replaces everything reported before."""


class EngineHeartbeat(Message, frozen=True):
    """engine → router on the side lane, every HEARTBEAT_SECONDS."""

    engine: Name
    epoch: Number
    """Random, new at every start of the process."""
    address: Name
    fingerprint: Name
    """Fingerprint of weights, configuration and dtype, the root of block hashes. Streams resume only on an equal one.
    """
    max_sequence_tokens: Count
    """Maximum length of prompt plus output of a sequence in this engine."""
    draining: bool
    stats: StepStats
    flushes: Annotated[list[tuple[Number, Count]], Meta(max_length=MAX_LISTED)] = []
    """(number, blocks freed) of the latest cache flushes, oldest first."""
    missed: Missed = {}
    """Frames lost on the way to this engine, by the lane's epoch. Submits or cancels may be among them."""
    tokenizer: Name = ""
    """Fingerprint of the tokenizer files."""
    steps: Annotated[list[StepStats], Meta(max_length=MAX_STATS)] = []
    """Steps since the last heartbeat, or the latest of them if there are many. Empty while idle."""
    requests: Annotated[list[RequestProgress], Meta(max_length=MAX_STATS)] = []
    """Requests that changed or ended since the last heartbeat."""
    cache: CacheChanges | None = None
    """For the router that this heartbeat is sent to."""
    max_batch_size: Count = 0
    """Maximum number of sequences in one step. 0: unknown."""
    progress: Total = 0
    """Iterations of the engine's loop since its start, including idle ones. If it does not grow, a step hangs."""
    cut_off: Annotated[list[Name], Meta(max_length=MAX_LISTED)] = []
    """Addresses of detokenizers whose lanes have accepted nothing for CUT_OFF_SECONDS."""
    quarantine: Number | None = None
    """The request that the engine runs alone (`Submit.alone`) while it refuses all others."""
    model_version: Name = ""
    """The operator's label of the model (setting `model_version`), by which a router chooses engines."""
    offers: Annotated[frozenset[Offer], Meta(max_length=MAX_LISTED)] = frozenset()
    """What requests may need and not every engine offers."""
    adapters: AdapterChanges | None = None
    """For the router that this heartbeat is sent to."""
    cache_events: bool = False
    """Whether the engine records KV cache events, for `ReadCacheEvents`."""
    prompt_adapters: AdapterChanges | None = None
    """For the router that this heartbeat is sent to."""
    version: Name = ""
    """Version of the engine's build."""
    kv_group: Name = ""
    """Engines with the same group copy blocks from each other's KV cache, even after the death of the one that computed
    them. Empty: none do."""
    kv_keeper: Name = ""
    """Address of the keeper that hands out this engine's KV blocks to engines of other machines. Empty: there is none,
    and this engine asks no others."""
    kv_layout: Name = ""
    """What the bytes of its blocks mean: blocks of another layout are of no use to it."""
    phase: Phase = "both"
    challenge: Number = 0
    """See `Hello`."""


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
    missed: Missed = {}
    """Frames lost on the way from engines, by the engine's epoch."""
    version: Name = ""
    """Version of the detokenizer's build."""
    challenge: Number = 0
    """See `Hello`."""


class Epochs(NamedTuple):
    """The epochs of the successive processes at one address."""

    latest: int | None = None
    former: tuple[int, ...] = ()

    def is_former(self, epoch: int) -> bool:
        """Whether the process of this epoch has been replaced, so that its messages are late."""
        return epoch in self.former

    def replaced_by(self, epoch: int) -> bool:
        """Whether this epoch is new and replaces the latest one."""
        return self.latest not in (None, epoch) and epoch not in self.former

    def after(self, epoch: int) -> "Epochs":
        """The epochs after a message of this epoch."""
        if self.latest is None:
            return Epochs(epoch)
        # Bounded, because any permitted sender can invent epochs.
        return Epochs(epoch, (*self.former, self.latest)[-MAX_FORMER:]) if self.replaced_by(epoch) else self
