"""The adapters in an engine's host memory, without weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sluice.wire.adapters import Adapter, AdapterFiles, join_parts
from sluice.wire.errors import ErrorCode, Fault


def files(text: str, size: int = 100) -> AdapterFiles:
    return AdapterFiles(b"{}", text.encode() * size)


@dataclass
class FakeLoading:
    """A load that is done after `polls` polls."""

    version: str = ""
    rank: int = 0
    fault: Fault | None = None
    polls: int = 1
    done: bool = False

    def poll(self) -> bool:
        self.polls -= 1
        self.done = self.done or self.polls <= 0
        return self.done

    def withdraw(self) -> None:
        """Nothing to release."""


class FakeLibrary:
    """An `AdapterLibrary` whose loads take `polls` polls each."""

    def __init__(self) -> None:
        self.folders: dict[str, AdapterFiles] = {}
        """The file system: adapter files by path."""
        self.host: dict[str, AdapterFiles] = {}
        """What was loaded, by version."""
        self.used: set[str] = set()
        """Versions that requests use, which cannot be removed."""
        self.bad: set[str] = set()
        """Versions whose files are malformed."""
        self.refused: set[str] = set()
        """Malformed versions that were uploaded."""
        self.polls = 1

    def load(self, path: str) -> FakeLoading:
        if path not in self.folders:
            return FakeLoading(fault=Fault(ErrorCode.INVALID_ARGUMENT.name, f"{path} is not a folder"))
        return self._load(self.folders[path])

    def offer(self, version: str, parts: Sequence[bytes]) -> FakeLoading:
        missing = FakeLoading(fault=Fault(ErrorCode.ADAPTER_MISSING.name, "not this version"), polls=self.polls)
        try:
            files = join_parts(parts)
        except msgspec.DecodeError:
            return missing
        if files.version != version:
            return missing
        self.refused |= {version} & self.bad
        return self._load(files)

    def _load(self, files: AdapterFiles) -> FakeLoading:
        if files.version in self.bad:
            return FakeLoading(fault=Fault(ErrorCode.INVALID_ARGUMENT.name, "not a safetensors file"), polls=self.polls)
        self.host[files.version] = files
        return FakeLoading(files.version, 8, polls=self.polls)

    def rank(self, version: str) -> int | None:
        return 8 if version in self.host else None

    def remove(self, version: str) -> bool:
        if version not in self.used:
            self.host.pop(version, None)
        return version not in self.used

    def fault(self, adapter: Adapter) -> Fault | None:
        """Why a request with this adapter cannot run; None: it can."""
        if adapter.version in self.host:
            return None
        if not adapter.path and adapter.version in self.refused:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, "not a safetensors file", "spec.lora_id")
        if adapter.path and self.load(adapter.path).version == adapter.version:
            return None
        return Fault(ErrorCode.ADAPTER_MISSING.name, f"this engine does not hold adapter {adapter.id!r}")
