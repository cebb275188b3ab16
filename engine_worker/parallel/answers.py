"""Answers of the other ranks to a call: through the group's store, since the channel only goes from rank 0 to them.

A rank stores its answer before it reports the command as completed, so rank 0 never waits for the store.
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from engine_worker.parallel.channel import ChannelSender
from sluice.ring.calls import RankAnswer, failed


def store_answer(store: Store, number: int, rank: int, answer: RankAnswer) -> None:
    """On a rank other than 0. Raises DistError."""
    store.set(_key(number, rank), msgspec.json.encode(answer).decode())


class StoredAnswers:
    """On rank 0: the answers to one call."""

    def __init__(self, store: Store, sender: ChannelSender, number: int, sent: int, ranks: Sequence[int]) -> None:
        """`number`: of the call; `sent`: of its command on the channel; `ranks`: those that it names, but 0."""
        self._store = store
        self._sender = sender
        self._number = number
        self._sent = sent
        self._ranks = ranks

    def poll(self) -> list[RankAnswer] | None:
        """One per rank once all have completed the command; None before."""
        if any(self._sender.completed(rank) < self._sent for rank in self._ranks):
            return None
        return [self._take(rank) for rank in self._ranks]

    def _take(self, rank: int) -> RankAnswer:
        key = _key(self._number, rank)
        try:
            if not self._store.check([key]):
                return failed(rank, "its answer was lost; it may have run the method")
            found = msgspec.json.decode(self._store.get(key), type=RankAnswer)
            self._store.delete_key(key)
        except (DistError, msgspec.MsgspecError) as error:
            return failed(rank, f"its answer cannot be read: {error}")
        return found


def _key(number: int, rank: int) -> str:
    return f"sluice/call/{number}/{rank}"
