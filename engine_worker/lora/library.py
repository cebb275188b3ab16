"""The adapters of an engine, as its thread sees them: loaded by threads of their own, kept in host memory, found by
version.

All state belongs to the engine's thread; a loading thread only turns files into weights.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from engine_worker.layers.adapters import Target
from engine_worker.lora.checkpoint import CONFIG, AdapterError, AdapterWeights, read_adapter, read_files
from engine_worker.lora.host import HostAdapters
from engine_worker.lora.loading import Loaded, Loading
from engine_worker.lora.uploads import WaitingUploads
from engine_worker.protocol import HostUsage
from sluice.ring.adapters import Adapter, AdapterFiles, join_parts
from sluice.ring.errors import ErrorCode, Fault
from sluice.settings.engine import LoraOptions

MAX_LOADING = 64
"""Adapters that load, or wait for a thread or for host memory, beside those that requests wait for."""
MAX_UNSERVABLE = 256
"""Uploads of which it is remembered why they cannot be served."""


class OtherFilesError(AdapterError):
    """The files are not those that were asked for."""


class LibraryPlan(NamedTuple):
    """What a library is for: a model, and the memory for adapters."""

    targets: Sequence[Target]
    dtype: torch.dtype
    num_pages: int
    """On the device."""
    host_bytes: int


class AdapterLibrary:
    def __init__(self, options: LoraOptions, plan: LibraryPlan, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError on a folder that does not exist."""
        self.num_pages = plan.num_pages
        self._options = options
        self._dtype = plan.dtype
        self._targets = {target.path: target for target in plan.targets}
        self._folders = [_existing("lora_folders", folder) for folder in options.lora_folders]
        self._host = HostAdapters(plan.host_bytes)
        self._threads = ThreadPoolExecutor(options.lora_num_put_workers, "adapters")
        self._ended: Counter[str] = Counter()
        """Loads since the start, by outcome."""
        self._loading: list[Loading] = []
        self._awaited: dict[tuple[str, str], Loading] = {}
        """Those that requests wait for, by version and path: two ids may have the same version from different folders,
        of which one may be replaced. An empty path: an upload that is being read may be it."""
        self._unservable: dict[str, Fault] = {}
        """By version: uploads that cannot be served, and why, the latest last."""
        self._uploads = WaitingUploads(self._host, options.lora_num_put_workers, clock)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prepare(self, adapter: Adapter) -> Loading | None:
        """None: it is in host memory. Else it is loaded from its path, and done later. ADAPTER_MISSING: it was
        uploaded, and is not here."""
        self.advance()
        self._uploads.on_request(adapter.version)
        if self._host.touch(adapter.version):
            return None
        source = adapter.version, adapter.path
        found = self._awaited.get(source)
        if found is not None:
            return found
        if adapter.path:
            found = Loading(self.advance, partial(self._read_path, adapter.path, adapter.version), patient=True)
            self._loading.append(found)
            self._begin_patient()
        else:
            found = Loading(self.advance, patient=True)
        self._awaited[source] = found
        self._end_awaited()
        return found

    def load(self, path: str) -> Loading:
        """From a folder on this machine."""
        return self._bounded(partial(self._read_path, path, None))

    def offer(self, version: str, parts: Sequence[bytes]) -> Loading:
        """That was uploaded: the data of all parts, see `AdapterPart`. ADAPTER_MISSING: not this version."""
        return self._bounded(partial(self._read_upload, version, parts), version)

    def held(self) -> list[str]:
        """Versions in host memory."""
        self.advance()
        return self._host.versions

    @property
    def usage(self) -> HostUsage:
        """For any thread."""
        return HostUsage(len(self._host), self._host.used, self._host.num_bytes, self._host.evictions, self._ended)

    def remove(self, version: str) -> bool:
        """From host memory; False: a live request uses it."""
        return self._host.remove(version)

    def acquire(self, version: str) -> None:
        """A request that uses it begins: once it is here it stays."""
        self._host.acquire(version)

    def release(self, version: str) -> None:
        """That request has ended."""
        self._host.release(version)

    def weights(self, version: str) -> AdapterWeights:
        return self._host[version]

    def pages_of(self, version: str) -> int:
        """Pages that it takes on the device; it must be in host memory."""
        return self._host[version].num_pages(self._options.lora_optimal_adapter_size)

    def prefetch(self) -> list[tuple[str, str]]:
        """Load what the folder `lora_prefetch_dir` has, one adapter per folder in it, as far as host memory goes.
        Returns what was left out, with the reason. Raises ValueError."""
        if self._options.lora_prefetch_dir is None:
            return []
        left_out = []
        for folder in sorted(_existing("lora_prefetch_dir", self._options.lora_prefetch_dir).iterdir()):
            if (folder / CONFIG).is_file():
                try:
                    loaded = self._read(read_files(folder, self._targets.values(), self._max_rank))
                except AdapterError as error:
                    left_out.append((str(folder), str(error)))
                    continue
                if self._host.used + loaded.weights.nbytes > self._host.num_bytes:
                    left_out.append((str(folder), "host memory for adapters is full"))
                else:
                    self._host.add(loaded.version, loaded.weights)
        return left_out

    def advance(self) -> None:
        """Store what the threads have loaded. Never waits."""
        self._uploads.advance(version for version, path in self._awaited if not path)
        if not (self._loading or self._awaited):
            return
        for loading in list(self._loading):
            if loading.future is not None and loading.future.done():
                self._store(loading, loading.future)
                if loading.done:
                    self._ended["LOADED" if loading.fault is None else loading.fault.code] += 1
        self._end_awaited()
        self._loading = [loading for loading in self._loading if not loading.done]
        self._begin_patient()

    def _begin_patient(self) -> None:
        """Those for which there is room, or of which it is not known; one per thread, since what was read is in memory
        beside the other adapters until it is stored."""
        waiting = [loading for loading in self._loading if loading.patient and loading.readable]
        if not waiting:
            return
        reading = sum(loading.patient and loading.future is not None for loading in self._loading)
        room = self._host.room
        fitting = [loading for loading in waiting if loading.nbytes <= room]
        for loading in fitting[: max(0, self._options.lora_num_put_workers - reading)]:
            loading.begin(self._threads)

    def _end_awaited(self) -> None:
        """Those whose version has come, wherever from, and those that no upload brings."""
        reading = any(not (loading.patient or loading.done) for loading in self._loading)
        for (version, path), loading in self._awaited.items():
            if version in self._host:
                loading.end()
            elif not (path or reading or version in self._uploads):
                fault = self._unservable.get(version)
                if fault is None:
                    fault = _fault(ErrorCode.ADAPTER_MISSING, "this engine does not hold its uploaded files")
                    self._uploads.on_refused(version)
                loading.end(fault)
        self._awaited = {source: loading for source, loading in self._awaited.items() if not loading.done}

    @property
    def _max_rank(self) -> int:
        return self._options.lora_max_adapter_size

    def _store(self, loading: Loading, future: "Future[Loaded]") -> None:
        try:
            loaded = future.result()
        except OtherFilesError as error:
            # Another engine may still hold it.
            loading.end(_fault(ErrorCode.ADAPTER_MISSING, str(error)))
            return
        except AdapterError as error:
            fault = _fault(ErrorCode.INVALID_ARGUMENT, f"the adapter cannot be served: {error}")
            if loading.uploaded:
                self._remember(loading.uploaded, fault)
            loading.end(fault)
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, the requests that wait must end
            loading.end(Fault(ErrorCode.INTERNAL.name, f"loading the adapter failed: {type(error).__name__}: {error}"))
            return
        if self._host.add(loaded.version, loaded.weights):
            self._uploads.on_stored(loaded.version)
            loading.version, loading.rank = loaded.version, loaded.weights.rank
            loading.end()
        elif loading.patient:
            loading.future, loading.nbytes = None, loaded.weights.nbytes
        else:
            loading.end(_fault(ErrorCode.OVERLOADED, "host memory for adapters is full of adapters in use"))
            if loading.uploaded:
                self._uploads.add(loaded.version, loaded.weights)

    def _remember(self, version: str, fault: Fault) -> None:
        self._unservable[version] = fault
        while len(self._unservable) > MAX_UNSERVABLE:
            del self._unservable[next(iter(self._unservable))]

    def _bounded(self, read: Callable[[], Loaded], uploaded: str = "") -> Loading:
        self.advance()
        if sum(not loading.patient for loading in self._loading) >= MAX_LOADING:
            return self._refused(ErrorCode.OVERLOADED, f"{MAX_LOADING} adapters are being loaded")
        loading = Loading(self.advance, read, uploaded=uploaded)
        loading.begin(self._threads)
        self._loading.append(loading)
        return loading

    def _refused(self, code: ErrorCode, message: str) -> Loading:
        loading = Loading(self.advance)
        loading.end(_fault(code, message))
        return loading

    def _read_path(self, path: str, version: str | None) -> Loaded:
        """In a loading thread."""
        folder = self._allowed(path)
        files = read_files(folder, self._targets.values(), self._max_rank)
        if version is not None and files.version != version:
            raise OtherFilesError(f"{path} holds other files than when the adapter was loaded")
        return self._read(files)

    def _read_upload(self, version: str, parts: Sequence[bytes]) -> Loaded:
        """In a loading thread."""
        try:
            files = join_parts(parts)
        except msgspec.DecodeError as error:
            raise OtherFilesError(f"what was uploaded is malformed: {error}") from error
        if files.version != version:
            raise OtherFilesError("other files were uploaded than those of this version")
        return self._read(files)

    def _allowed(self, path: str) -> Path:
        """Without symbolic links. Raises AdapterError if it lies outside of `lora_folders`."""
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise AdapterError(f"{path!r} is not a folder: {error}") from error
        if not self._folders:
            raise AdapterError(f"{path!r} is a folder of the engine, and lora_folders allows none: upload it instead")
        if not any(folder.is_relative_to(allowed) for allowed in self._folders):
            raise AdapterError(f"{path!r} does not lie in one of lora_folders")
        return folder

    def _read(self, files: AdapterFiles) -> Loaded:
        weights = read_adapter(files, self._targets, self._max_rank, self._dtype)
        pages = weights.num_pages(self._options.lora_optimal_adapter_size)
        if pages > self.num_pages:
            raise AdapterError(
                f"it takes {pages} pages of the device's memory for adapters, which has {self.num_pages}"
            )
        if weights.nbytes > self._host.num_bytes:
            raise AdapterError(
                f"it takes {weights.nbytes} bytes; lora_host_cache_size leaves {self._host.num_bytes} for all adapters"
            )
        return Loaded(files.version, weights)


def _fault(code: ErrorCode, message: str) -> Fault:
    return Fault(code.name, message, "spec.lora_id")


def _existing(setting: str, folder: str) -> Path:
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ValueError(f"{setting}: {folder} is not a folder")
    return path
