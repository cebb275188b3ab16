"""Adapters that fuzzed messages name, and an engine's adapter library without weights."""

from collections.abc import Sequence

from engine_worker.protocol import HostUsage, Preparation
from engine_worker.step import AdapterLoad
from sluice.wire.adapters import Adapter, AdapterChanges, AdapterEntry, version_of
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.requests import Submit
from sluice.wire.tables import Table
from tests.fakes.adapters import ScriptedAdapters
from tests.fakes.library import FakeLibrary, FakeLoading, files
from tests.fakes.runner import ScriptedRunner
from tests.fakes.scripted_tokens import HIDDEN_SIZE
from tests.fakes.submits import extras_of

CHANGED_AT = 1.7e9
FOLDER = "/adapters/a"
BY_PATH, UPLOADED = files("by path"), files("uploaded")
ADAPTER = Adapter("a", BY_PATH.version, FOLDER)
ENTRIES = [
    AdapterEntry("a", CHANGED_AT, BY_PATH.version, FOLDER, 8),
    AdapterEntry("b", CHANGED_AT, UPLOADED.version),
    AdapterEntry("c", CHANGED_AT, UPLOADED.version, removed=True),
]
CHANGES = AdapterChanges(3, ENTRIES)
TABLE = Table.of(2, HIDDEN_SIZE, "float32", bytes(range(2 * HIDDEN_SIZE * 4)))
PROMPT_ENTRY = AdapterEntry("p", CHANGED_AT, version_of(TABLE), size=TABLE.rows)
PROMPT_REMOVED = AdapterEntry("q", CHANGED_AT, version_of(TABLE), removed=True)


class OnePage(dict[str, int]):
    """Sizes of adapters by version: one page each."""

    def __missing__(self, version: str) -> int:
        return 1


class Library(ScriptedAdapters):
    """Adapters on the device, as scripted, and in host memory."""

    def __init__(self) -> None:
        super().__init__(2, OnePage())
        self._host = FakeLibrary()
        self._host.folders[FOLDER] = BY_PATH

    @property
    def usage(self) -> HostUsage:
        return HostUsage(len(self._host.host), 0, 0, 0, {})

    def load(self, source: str | tuple[AdapterLoad, ...], *, fail: bool = False) -> FakeLoading | None:
        """Load a folder into host memory, or adapters from there onto the device."""
        return self._host.load(source) if isinstance(source, str) else super().load(source, fail=fail)

    def offer(self, version: str, parts: Sequence[bytes]) -> FakeLoading:
        return self._host.offer(version, parts)

    def rank(self, version: str) -> int | None:
        return self._host.rank(version)

    def remove(self, version: str) -> bool:
        return not self.users[version] and self._host.remove(version)

    def prepare(self, adapter: Adapter) -> Preparation | None:
        fault = self._host.fault(adapter)
        return None if fault is None else FakeLoading(fault=fault)


class Runner(ScriptedRunner):
    """A scripted runner with an adapter library."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, tokens_per_block)
        self.adapters = self.library = Library()

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        adapter = extras_of(spec).adapter
        return None if running or adapter is None else self.library.prepare(adapter)


REFUSED = Fault(ErrorCode.INVALID_ARGUMENT.name, "not a safetensors file")
