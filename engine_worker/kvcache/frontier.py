"""Which block each holder computes next, so that nobody else computes the same one beside it."""

from engine_worker.request import Sequence


class Frontiers:
    """At most one full block per holder: the first that is not computed, where its tokens are known."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Sequence] = {}
        self._digests: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def move(self, sequence: Sequence, digest: bytes | None) -> None:
        """The holder computes the block with this hash next; None: none, or it holds memory no more."""
        before = self._digests.pop(sequence, None)
        if before is not None and self._holders.get(before) is sequence:
            del self._holders[before]
        if digest is not None:
            self._digests[sequence] = digest
            self._holders.setdefault(digest, sequence)

    def holder(self, digest: bytes) -> Sequence | None:
        """Who computes the block with this hash next."""
        return self._holders.get(digest)
