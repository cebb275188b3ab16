"""Sends rows to the detokenizers; while a lane is full, waiting rows are joined. No call blocks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace
from structlog.stdlib import BoundLogger

from sluice.lanes.lane import SendLane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.rows import Open, TokenBatch, TokenRow
from sluice.wire.timing import CUT_OFF_FORGET_SECONDS, CUT_OFF_SECONDS, KEEP_ALIVE_SECONDS, LANE_FORGET_SECONDS

TOKENS_PER_MESSAGE = 8192
"""Limit on the tokens in a message, counting rows, the tokens of resumed streams in opens, and prompt
log-probabilities."""
MAX_LANES = 256


@dataclass(slots=True)
class _Peer:
    lane: SendLane
    used_at: float
    """When its last request ended."""
    accepted_at: float
    """When its lane last accepted a message."""
    users: int = 0
    """Number of live requests that send to this detokenizer."""
    opens: list[Open] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    rows: dict[tuple[int, int, int], TokenRow] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        return bool(self.rows or self.opens or self.prompt_logprobs)


class Outbox:
    """Queues rows until the lane to their detokenizer accepts them.

    Waiting rows are joined per sequence, so memory is bounded by the tokens of requests that are live or have ended
    within LANE_FORGET_SECONDS.
    """

    def __init__(
        self,
        engine: str,
        epoch: int,
        open_lane: Callable[[str], SendLane],
        clock: Callable[[], float],
        log: BoundLogger,
    ) -> None:
        """`open_lane` raises ValueError on an invalid address. `clock`: seconds."""
        self.lost = 0
        """Rows dropped since the start."""
        self.cut_off: list[str] = []
        """Addresses whose lane accepts no messages. Replaced as a whole, since the heartbeat thread reads it."""
        self._engine = engine
        self._epoch = epoch
        self._open_lane = open_lane
        self._clock = clock
        self._log = log
        self._peers: dict[str, _Peer] = {}
        self._kept_alive_at = clock()

    @property
    def waiting(self) -> bool:
        return any(peer.waiting for peer in self._peers.values())

    def flowing(self, seconds: float) -> bool:
        """Whether messages wait for a lane that has accepted one within this time."""
        now = self._clock()
        return any(peer.waiting and now - peer.accepted_at < seconds for peer in self._peers.values())

    def connect(self, address: str) -> None:
        """Call when a request that uses this address begins. Raises ValueError if the address is invalid or all lanes
        are in use."""
        peer = self._peers.get(address)
        if peer is None:
            self._make_room()
            peer = self._peers[address] = _Peer(self._open_lane(address), self._clock(), self._clock())
        peer.users += 1
        if address not in self.cut_off and not self.reaches(address):
            # Set it now, not at the next tick, so that the next heartbeat reports it.
            self.cut_off = [*self.cut_off, address]

    def reaches(self, address: str) -> bool:
        """Whether the lane to this address, to which a request must be connected, has a file descriptor."""
        lane = self._peers[address].lane
        return lane.open or lane.ready()

    def disconnect(self, address: str) -> None:
        """Call when the last row of a request that uses this address was put."""
        peer = self._peers[address]
        peer.users -= 1
        peer.used_at = self._clock()

    def open(self, address: str, opened: Open) -> None:
        """Call before the request's first row is put."""
        self._peers[address].opens.append(opened)

    def put_prompt_logprobs(self, address: str, logprobs: PromptLogprobs) -> None:
        """Call after the request's `open`, before its first row with tokens is put."""
        self._peers[address].prompt_logprobs.append(logprobs)

    def put(self, address: str, new_rows: Iterable[TokenRow]) -> None:
        """Queue rows. Takes ownership of the lists in them."""
        rows = self._peers[address].rows
        for row in new_rows:
            key = (row.request, row.attempt, row.sequence)
            queued = rows.setdefault(key, row)
            if queued is not row:
                queued.tokens.extend(row.tokens)
                queued.logprobs.extend(row.logprobs)
                if row.end is not None or row.accepted:
                    rows[key] = replace(queued, end=row.end, accepted=queued.accepted + row.accepted)

    def flush(self) -> None:
        for peer in self._peers.values():
            while peer.waiting and peer.lane.ready() and self._send_oldest(peer):
                pass

    def tick(self) -> None:
        """Call at least every second: sends keep-alives, drops rows for dead lanes, closes unused lanes."""
        now = self._clock()
        if now - self._kept_alive_at < KEEP_ALIVE_SECONDS and not self._reconnected():
            return
        self._kept_alive_at = now
        for address, peer in list(self._peers.items()):
            # Also needed after rows were lost: the receiver sees the gap in the frame numbers only at the next frame.
            if peer.lane.ready() and peer.lane.send(KeepAlive(self._engine, self._epoch)):
                peer.accepted_at = now
            elif now - peer.accepted_at >= LANE_FORGET_SECONDS:
                self._drop(address, peer)
            forget_after = CUT_OFF_FORGET_SECONDS if address in self.cut_off else LANE_FORGET_SECONDS
            if not peer.users and now - peer.used_at >= forget_after:
                self._close(address)
        self.cut_off = [address for address, peer in self._peers.items() if self._is_cut_off(peer, now)]

    def close(self, linger: float = 0.0) -> None:
        """Drop waiting rows and close all lanes; each may take `linger` seconds to transmit what it has accepted."""
        for address in list(self._peers):
            self._close(address, linger)

    def _reconnected(self) -> bool:
        """Whether a lane that was cut off accepts messages again."""
        return any(address in self._peers and self._peers[address].lane.ready() for address in self.cut_off)

    def _is_cut_off(self, peer: _Peer, now: float) -> bool:
        return not peer.lane.open or now - peer.accepted_at >= CUT_OFF_SECONDS

    def _make_room(self) -> None:
        """Close an idle lane if MAX_LANES are open. Raises ValueError if none is idle."""
        if len(self._peers) < MAX_LANES:
            return
        idle = next((address for address, peer in self._peers.items() if not (peer.users or peer.waiting)), None)
        if idle is None:
            raise ValueError(f"all {MAX_LANES} lanes are in use")
        self._close(idle)

    def _send_oldest(self, peer: _Peer) -> bool:
        """Send the oldest opens and rows, up to TOKENS_PER_MESSAGE. False if the lane is full in spite of `ready`."""
        num_opens, num_logprobs, keys, tokens = 0, 0, [], 0
        for opened in peer.opens:
            if tokens >= TOKENS_PER_MESSAGE:
                break
            num_opens += 1
            tokens += sum(map(len, opened.resume.values()))
        # A row must not precede its stream's open or the log-probabilities of its prompt: send those first.
        for logprobs in peer.prompt_logprobs if num_opens == len(peer.opens) else ():
            if tokens >= TOKENS_PER_MESSAGE:
                break
            num_logprobs += 1
            tokens += logprobs.rows
        all_sent = num_opens == len(peer.opens) and num_logprobs == len(peer.prompt_logprobs)
        for key, row in peer.rows.items() if all_sent else ():
            if tokens >= TOKENS_PER_MESSAGE:
                break
            keys.append(key)
            tokens += len(row.tokens)
        rows = [peer.rows[key] for key in keys]
        logprobs_sent = peer.prompt_logprobs[:num_logprobs]
        batch = TokenBatch.of(self._engine, self._epoch, peer.opens[:num_opens], rows, logprobs_sent)
        if not peer.lane.send(batch):
            return False
        del peer.opens[:num_opens], peer.prompt_logprobs[:num_logprobs]
        for key in keys:
            del peer.rows[key]
        peer.accepted_at = self._clock()
        return True

    def _drop(self, address: str, peer: _Peer) -> None:
        if peer.waiting:
            self.lost += len(peer.rows)
            self._log.error("rows_lost", detokenizer=address, rows=len(peer.rows), opens=len(peer.opens))
            peer.rows, peer.opens, peer.prompt_logprobs = {}, [], []

    def _close(self, address: str, linger: float = 0.0) -> None:
        peer = self._peers.pop(address)
        self._drop(address, peer)
        peer.lane.close(linger)
