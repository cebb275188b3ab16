"""Dispatches the messages in the engine's inbox to their handlers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from structlog.stdlib import BoundLogger

from engine_worker.ringside.adapters import Adapters, PromptAdapters
from engine_worker.ringside.calls import Calls
from engine_worker.ringside.heartbeats import EventReads, RouterTable
from sluice.lanes.inbox import Gap, Inbox
from sluice.wire.adapters import AdapterMessage, PromptAdapterMessage, ReadPromptAdapter, StorePromptAdapter
from sluice.wire.cache_events import ReadCacheEvents
from sluice.wire.calls import EngineCall
from sluice.wire.heartbeats import Hello
from sluice.wire.requests import Cancel, Flush, Submit, ToEngine

MAX_FLUSHES_REPORTED = 16
"""Latest cache flushes that heartbeats report."""
MAX_LANES_REPORTED = 64
"""Lanes with lost frames that heartbeats report."""


@dataclass(eq=False)
class Receiver:
    """Reads the inbox. To be used in the engine's thread, except `flushes` and `missed`: the heartbeat thread reads
    them, so they are replaced as a whole, never modified."""

    _inbox: "Inbox[ToEngine]"
    _epoch: int
    _routers: RouterTable
    _flush: Callable[[], int]
    """Clears the prefix cache and returns the number of freed blocks."""
    _calls: Calls
    _event_reads: EventReads
    _adapters: Adapters
    _prompt_adapters: PromptAdapters
    _dropped: Counter[str]
    """See `Mailbox`."""
    _log: BoundLogger
    flushes: list[tuple[int, int]] = field(default_factory=list)
    """(number of the flush, blocks freed) of the latest cache flushes."""
    missed: dict[int, int] = field(default_factory=dict)
    """Number of lost frames by lane."""

    def receive(self) -> list[Submit | Cancel | Hello]:
        """Handle all messages except those for the mailbox, which are returned. Does not wait."""
        for_mailbox: list[Submit | Cancel | Hello] = []
        for message in self._inbox.receive():
            if isinstance(message, Submit | Cancel):
                for_mailbox.append(message)
            elif isinstance(message, Hello):
                # Must precede on_hello, which records the new epoch. The mailbox ends the replaced router's requests.
                if self._routers.is_replacement(message):
                    for_mailbox.append(message)
                if not self._routers.on_hello(message):
                    self._dropped["too_many_routers"] += 1
            else:
                self._handle(message)
        return for_mailbox

    def _handle(
        self, message: Gap | Flush | EngineCall | ReadCacheEvents | AdapterMessage | PromptAdapterMessage
    ) -> None:
        if isinstance(message, Gap):
            self._on_gap(message)
        elif isinstance(message, Flush):
            self._on_flush(message)
        elif isinstance(message, EngineCall):
            self._calls.begin(message)
        elif isinstance(message, ReadCacheEvents):
            if not self._event_reads.put(message):
                self._dropped["cache_events"] += 1
        elif isinstance(message, StorePromptAdapter | ReadPromptAdapter):
            self._prompt_adapters.on_message(message)
        else:
            self._adapters.on_message(message)

    def _on_gap(self, gap: Gap) -> None:
        if gap.lane_known:
            self._log.warning("frames_lost", lane=gap.lane, missed=gap.missed)
        else:
            self._log.info("lane_taken_over", lane=gap.lane, frames=gap.missed)
        # Reinsert the lane at the end, so that the lanes without a recent gap are forgotten first.
        missed = {lane: count for lane, count in self.missed.items() if lane != gap.lane}
        missed[gap.lane] = self.missed.get(gap.lane, 0) + gap.missed
        self.missed = dict(list(missed.items())[-MAX_LANES_REPORTED:])

    def _on_flush(self, message: Flush) -> None:
        if message.engine_epoch == self._epoch:
            blocks = self._flush()
            self.flushes = [*self.flushes, (message.number, blocks)][-MAX_FLUSHES_REPORTED:]
            self._log.info("cache_flushed", blocks=blocks)
