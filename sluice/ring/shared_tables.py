"""Prompt tables of the requests that a service holds: equal ones are in memory once, and all of them are bounded."""

from collections.abc import Iterable

from sluice.ring.tables import Table


class SharedTables:
    def __init__(self) -> None:
        self.num_bytes = 0
        self._tables: dict[bytes, Table] = {}
        """By digest."""
        self._users: dict[bytes, int] = {}

    def knows(self, table: Table) -> bool:
        """Whether one of the same digest is here, whose rows then are those of the digest."""
        found = self._tables.get(table.digest)
        # What came with a digest may be something else.
        return found is not None and _shape(found) == _shape(table)

    def num_bytes_with(self, tables: Iterable[Table]) -> int:
        """What `take` would make of it."""
        new = {table.digest: len(table.data) for table in tables if table.digest not in self._tables}
        return self.num_bytes + sum(new.values())

    def take(self, tables: Iterable[Table]) -> tuple[Table, ...]:
        """For one more request, until it releases what this returns: equal tables, of which others may be the users."""
        return tuple(map(self._take, tables))

    def release(self, tables: Iterable[Table]) -> None:
        for table in tables:
            self._users[table.digest] -= 1
            if not self._users[table.digest]:
                del self._users[table.digest]
                self.num_bytes -= len(self._tables.pop(table.digest).data)

    def _take(self, table: Table) -> Table:
        if table.digest not in self._tables:
            self._tables[table.digest] = table
            self.num_bytes += len(table.data)
        self._users[table.digest] = self._users.get(table.digest, 0) + 1
        return self._tables[table.digest]


def _shape(table: Table) -> tuple[int, int, str]:
    return table.rows, table.hidden_size, table.dtype
