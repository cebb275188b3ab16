"""Answers of the other ranks to a method call. They go through the group's store, because the channel only goes from
rank 0 to the other ranks.

A rank stores its answer before it reports the command as completed, so rank 0 never waits for the store.
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from engine_worker.parallel.channel import ChannelSender
from sluice.wire.calls import RankAnswer, failed


def store_answer(store: Store, number: int, rank: int, answer: RankAnswer) -> None:
    """Called on ranks other than 0. `number`: of the call. Raises DistError."""
    store.set(_key(number, rank), msgspec.json.encode(answer).decode())


class StoredAnswers:
    """The answers to one call, on rank 0."""

    def __init__(self, store: Store, sender: ChannelSender, number: int, sent: int, ranks: Sequence[int]) -> None:
        """`number`: number of the call. `sent`: number of its command on the channel. `ranks`: the ranks that the call
        names, without 0."""
        self._store = store
        self._sender = sender
        self._number = number
        self._sent = sent
        self._ranks = ranks

    def poll(self) -> list[RankAnswer] | None:
        """The answers, one per rank, once all ranks have completed the command; None before that."""
        if any(self._sender.completed(rank) < self._sent for rank in self._ranks):
            return None
        return [self._pop(rank) for rank in self._ranks]

    def _pop(self, rank: int) -> RankAnswer:
        key = _key(self._number, rank)
        try:
            if not self._store.check([key]):
                return failed(rank, "its answer was lost; it may have run the method")
            answer = msgspec.json.decode(self._store.get(key), type=RankAnswer)
            self._store.delete_key(key)
        except (DistError, msgspec.MsgspecError) as error:
            return failed(rank, f"its answer cannot be read: {error}")
        return answer


def _key(number: int, rank: int) -> str:
    return f"sluice/call/{number}/{rank}"
