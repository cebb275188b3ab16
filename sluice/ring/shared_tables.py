"""Prompt tables and images of the requests that a service holds: equal ones are in memory once, and all of them are
bounded."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from sluice.ring.images import Image
from sluice.ring.tables import Table

Part = TypeVar("Part", bound=Table | Image)


class SharedTables(Generic[Part]):
    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: dict[bytes, Part] = {}
        """By digest."""
        self._users: dict[bytes, int] = {}

    def knows(self, part: Part) -> bool:
        """Whether one of the same digest is here, whose data then are those of the digest."""
        found = self._parts.get(part.digest)
        # What came with a digest may be something else.
        return found is not None and _shape(found) == _shape(part)

    def num_bytes_with(self, parts: Iterable[Part]) -> int:
        """What `take` would make of it."""
        new = {part.digest: len(part.data) for part in parts if part.digest not in self._parts}
        return self.num_bytes + sum(new.values())

    def take(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """For one more request, until it releases what this returns: equal parts, of which others may be the users."""
        return tuple(map(self._take, parts))

    def release(self, parts: Iterable[Part]) -> None:
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
