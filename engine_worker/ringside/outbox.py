"""What the engine has to say to the detokenizers: rows by address, joined while a lane is full. Nothing here waits."""

from collections.abc import Callable, Iterable

from structlog.stdlib import BoundLogger

from sluice.ring.heartbeats import KeepAlive
from sluice.ring.lane import SendLane
from sluice.ring.timing import CUT_OFF_FORGET_SECONDS, CUT_OFF_SECONDS, KEEP_ALIVE_SECONDS, LANE_FORGET_SECONDS
from sluice.ring.wire import Open, TokenBatch, TokenRow

TOKENS_PER_MESSAGE = 8192
"""Of rows, and of what streams that begin resume from."""
MAX_LANES = 256


class _Peer:
    """One detokenizer: its lane, what waits for it, and how many live requests use it."""

    def __init__(self, lane: SendLane, now: float) -> None:
        self.lane = lane
        self.users = 0
        self.used_at = self.moved_at = now
        self.opens: list[Open] = []
        self.rows: dict[tuple[int, int, int], TokenRow] = {}

    @property
    def waiting(self) -> bool:
        return bool(self.rows or self.opens)


class Outbox:
    """Rows for every detokenizer in use.

    What a full lane leaves behind is joined per sequence, so it is at most the tokens of the requests that live, or
    ended within LANE_FORGET_SECONDS. `lost` counts rows that were given up.
    """

    def __init__(
        self,
        engine: str,
        epoch: int,
        open_lane: Callable[[str], SendLane],
        clock: Callable[[], float],
        log: BoundLogger,
    ) -> None:
        """`open_lane` raises ValueError for an address that is none; `clock` counts seconds."""
        self.lost = 0
        self.cut_off: list[str] = []
        """Addresses that nothing gets to; replaced whole, for the thread of the heartbeats reads it."""
        self._engine = engine
        self._epoch = epoch
        self._open_lane = open_lane
        self._clock = clock
        self._log = log
        self._peers: dict[str, _Peer] = {}
        self._pulsed_at = clock()

    @property
    def waiting(self) -> bool:
        """Whether a lane was full and something still has to go out."""
        return any(peer.waiting for peer in self._peers.values())

    def flowing(self, seconds: float) -> bool:
        """Whether something waits for a lane that has taken a message within so many seconds."""
        now = self._clock()
        return any(peer.waiting and now - peer.moved_at < seconds for peer in self._peers.values())

    def connect(self, address: str) -> None:
        """A request begins to use this address. Raises ValueError if it is none, or one too many."""
        peer = self._peers.get(address)
        if peer is None:
            self._make_room()
            peer = self._peers[address] = _Peer(self._open_lane(address), self._clock())
        peer.users += 1
        if address not in self.cut_off and not self.reaches(address):
            # Routers learn it by the next heartbeat, before the next tick.
            self.cut_off = [*self.cut_off, address]

    def reaches(self, address: str) -> bool:
        """Whether there was a descriptor for the lane to this address, which is connected."""
        lane = self._peers[address].lane
        return lane.open or lane.ready()

    def disconnect(self, address: str) -> None:
        """The request's last row has been put."""
        peer = self._peers[address]
        peer.users -= 1
        peer.used_at = self._clock()

    def open(self, address: str, opened: Open) -> None:
        """A stream begins; before its first row."""
        self._peers[address].opens.append(opened)

    def put(self, address: str, news: Iterable[TokenRow]) -> None:
        """Sequences' news; the lists in it belong to the outbox from now on."""
        rows = self._peers[address].rows
        for row in news:
            key = row[:3]
            held = rows.setdefault(key, row)
            if held is row:
                continue
            held.tokens.extend(row.tokens)
            held.logprobs.extend(row.logprobs)
            if row.end is not None:
                rows[key] = held._replace(end=row.end)

    def flush(self) -> None:
        """Send what the lanes take."""
        for peer in self._peers.values():
            while peer.waiting and peer.lane.ready() and self._send_some(peer):
                pass

    def tick(self) -> None:
        """At least every second: pulse, give up what a dead lane holds, close lanes that are done with."""
        now = self._clock()
        if now - self._pulsed_at < KEEP_ALIVE_SECONDS and not self._reconnected():
            return
        self._pulsed_at = now
        for address, peer in list(self._peers.items()):
            if peer.lane.ready() and peer.lane.send(KeepAlive(self._engine, self._epoch)):
                peer.moved_at = now
            elif now - peer.moved_at >= LANE_FORGET_SECONDS:
                self._give_up(address, peer)
            kept = CUT_OFF_FORGET_SECONDS if address in self.cut_off else LANE_FORGET_SECONDS
            if not peer.users and now - peer.used_at >= kept:
                self._close(address)
        self.cut_off = [address for address, peer in self._peers.items() if self._is_cut_off(peer, now)]

    def close(self, linger: float = 0.0) -> None:
        """Close every lane, after at most `linger` seconds each for what was sent."""
        for address in list(self._peers):
            self._close(address, linger)

    def _reconnected(self) -> bool:
        """Whether a lane that was cut off takes messages again."""
        return any(address in self._peers and self._peers[address].lane.ready() for address in self.cut_off)

    def _is_cut_off(self, peer: _Peer, now: float) -> bool:
        return not peer.lane.open or now - peer.moved_at >= CUT_OFF_SECONDS

    def _make_room(self) -> None:
        if len(self._peers) < MAX_LANES:
            return
        idle = next((address for address, peer in self._peers.items() if not (peer.users or peer.waiting)), None)
        if idle is None:
            raise ValueError(f"{MAX_LANES} lanes are in use")
        self._close(idle)

    def _send_some(self, peer: _Peer) -> bool:
        """Send all that waits or, if it is much, the oldest part; False if the lane was full after all."""
        opens, keys, tokens = 0, [], 0
        for opened in peer.opens:
            if tokens >= TOKENS_PER_MESSAGE:
                break
            opens += 1
            tokens += sum(map(len, opened.resume.values()))
        # Rows come after the beginnings of their streams.
        for key, row in peer.rows.items() if opens == len(peer.opens) else ():
            if tokens >= TOKENS_PER_MESSAGE:
                break
            keys.append(key)
            tokens += len(row.tokens)
        batch = TokenBatch.of(self._engine, self._epoch, peer.opens[:opens], [peer.rows[key] for key in keys])
        if not peer.lane.send(batch):
            return False
        peer.opens = peer.opens[opens:]
        peer.moved_at = self._clock()
        if len(keys) == len(peer.rows):
            peer.rows = {}
        else:
            for key in keys:
                del peer.rows[key]
        return True

    def _give_up(self, address: str, peer: _Peer) -> None:
        if not peer.waiting:
            return
        self.lost += len(peer.rows)
        self._log.error("rows_lost", detokenizer=address, rows=len(peer.rows), opens=len(peer.opens))
        peer.rows, peer.opens = {}, []

    def _close(self, address: str, linger: float = 0.0) -> None:
        peer = self._peers.pop(address)
        self._give_up(address, peer)
        peer.lane.close(linger)
