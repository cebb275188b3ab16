"""LoRA adapters without weights, for the scripted runner: which adapter occupies which pages of the device."""

from collections import Counter

from engine_worker.step import AdapterLoad
from sluice.wire.adapters import Adapter


def adapter(name: str) -> Adapter:
    """An adapter whose version is derived from its name."""
    return Adapter(name, name.encode().hex().ljust(32, "0"))


def initial_digest(version: str | None) -> int:
    """The digest of an empty sequence that uses this adapter version."""
    return 0 if version is None else int(version[:15], 16)


class ScriptedAdapters:
    """An `AdapterLibrary`, and the pages of the device. `violations` lists misuse, such as pages still in use."""

    def __init__(self, num_pages: int, sizes: dict[str, int]) -> None:
        """`sizes`: pages of each adapter, by version."""
        self.num_pages = num_pages
        self.sizes = sizes
        self.users: Counter[str] = Counter()
        self.violations: list[str] = []
        self.loads = 0
        self._versions: dict[int, str] = {}
        self._owners: dict[int, int] = {}
        self._pages: dict[int, tuple[int, ...]] = {}

    def pages_of(self, version: str) -> int:
        return self.sizes[version]

    def acquire(self, version: str) -> None:
        self.users[version] += 1

    def release(self, version: str) -> None:
        self.users[version] -= 1
        if self.users[version] < 0:
            self.violations.append(f"{version} is released too often")

    def launched(self, loads: tuple[AdapterLoad, ...]) -> dict[int, int]:
        """Called when a step with these loads is launched. Returns the number of the adapter by page written."""
        for load in loads:
            if not self.users[load.version]:
                self.violations.append(f"{load} is not used by any request")
            self._pages[load.number] = load.pages
        return {page: load.number for load in loads for page in load.pages}

    def pages(self, number: int) -> dict[int, int]:
        """Number of the adapter by page that it occupies."""
        return dict.fromkeys(self._pages.get(number, ()), number)

    def load(self, loads: tuple[AdapterLoad, ...], *, fail: bool = False) -> None:
        """`fail`: the first load writes its pages and then fails."""
        for load in loads:
            for number in load.dropped:
                self._versions.pop(number, None)
        for load in loads:
            self.loads += 1
            if len(load.pages) != self.sizes[load.version]:
                self.violations.append(f"{load} has the wrong number of pages")
            for page in load.pages:
                owner = self._owners.get(page)
                if owner != load.number and owner in self._versions:
                    self.violations.append(f"{load} overwrites page {page} of adapter {owner}")
                self._owners[page] = load.number
            if not fail or load is not loads[0]:
                self._versions[load.number] = load.version

    def version(self, number: int) -> str | None:
        """Version of the adapter with this number; None: it is not on the device."""
        version = self._versions.get(number)
        if version is not None and any(self._owners[page] != number for page in self._pages[number]):
            self.violations.append(f"a page of {number} was overwritten")
        return version
