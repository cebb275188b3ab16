"""Prompt tables and images of the requests in a service. Equal ones are in memory once, and their size is known."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from sluice.wire.images import Image
from sluice.wire.tables import Table

Part = TypeVar("Part", bound=Table | Image)


class SharedTables(Generic[Part]):
    """A reference-counted store of tables or images, by digest."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of all stored parts."""
        self._parts: dict[bytes, Part] = {}
        """By digest."""
        self._users: dict[bytes, int] = {}
        """Number of references by digest."""

    def knows(self, part: Part) -> bool:
        """Whether an equal part is stored, so that the digest of `part` need not be verified."""
        stored = self._parts.get(part.digest)
        # A part whose digest has not been verified may have another shape.
        return stored is not None and _shape(stored) == _shape(part)

    def num_bytes_with(self, parts: Iterable[Part]) -> int:
        """The value of `num_bytes` after `take` of these parts."""
        new = {part.digest: len(part.data) for part in parts if part.digest not in self._parts}
        return self.num_bytes + sum(new.values())

    def take(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Store parts, or add references to equal stored ones. Returns the stored parts, to be released later."""
        return tuple(map(self._take, parts))

    def release(self, parts: Iterable[Part]) -> None:
        """Drop one reference to each part."""
        for part in parts:
            self._users[part.digest] -= 1
            if not self._users[part.digest]:
                del self._users[part.digest]
                self.num_bytes -= len(self._parts.pop(part.digest).data)

    def _take(self, part: Part) -> Part:
        if part.digest not in self._parts:
            self._parts[part.digest] = part
            self.num_bytes += len(part.data)
        self._users[part.digest] = self._users.get(part.digest, 0) + 1
        return self._parts[part.digest]


def _shape(part: Table | Image) -> tuple[Any, ...]:
    if isinstance(part, Image):
        return part.rows, part.columns
    return part.rows, part.hidden_size, part.dtype
