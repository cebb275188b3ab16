"""The LoRA adapters of an engine, by version: loads them in separate threads and keeps them in host memory.

All state belongs to the engine's thread; the loading threads only convert files to weights.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from engine_worker.layers.adapters import Target
from engine_worker.lora.checkpoint import AdapterError, AdapterWeights, read_adapter, read_files
from engine_worker.lora.device import DeviceAdapters
from engine_worker.lora.host import HostAdapters, WaitingUploads
from engine_worker.protocol import HostUsage
from sluice.checkpoint.peft import CONFIG
from sluice.settings.engine import LoraOptions
from sluice.wire.adapters import Adapter, AdapterFiles, join_parts
from sluice.wire.errors import ErrorCode, Fault

MAX_LOADING = 64
"""Limit on the loads that do not belong to a waiting request, including those that wait for a thread."""
MAX_UNSERVABLE = 256
"""Uploads for which the reason why they cannot be served is remembered."""


class OtherFilesError(AdapterError):
    """The files are not those of the requested version."""


class Loaded(NamedTuple):
    version: str
    weights: AdapterWeights


class Loading:
    """See `engine_worker.protocol.Preparation`. Requests for the same version from the same path share it."""

    def __init__(
        self,
        advance: Callable[[], None],
        read: Callable[[], Loaded] | None = None,
        *,
        patient: bool = False,
        uploaded: str = "",
    ) -> None:
        """`read`: reads the adapter, in a thread; None: another load will provide it. `patient`: see the attribute.
        `uploaded`: the version, if the adapter was uploaded."""
        self.done = False
        self.fault: Fault | None = None
        self.version = ""
        """Known once the load has ended without a fault; so is `rank`."""
        self.rank = 0
        self.future: Future[Loaded] | None = None
        """None: the adapter is not being read."""
        self.nbytes = 0
        """Size in host memory; known once the adapter was read and there was no room for it."""
        self.patient = patient
        """Whether the load waits while host memory is full of adapters in use."""
        self.uploaded = uploaded
        self._advance = advance
        self._read = read

    @property
    def readable(self) -> bool:
        """Whether `begin` would read the adapter: it can be read and is not being read."""
        return self._read is not None and self.future is None

    def begin(self, threads: Executor) -> None:
        if self._read is not None:
            self.future = threads.submit(self._read)

    def poll(self) -> bool:
        if not self.done:
            self._advance()
        return self.done

    def withdraw(self) -> None:
        """No effect: the load continues, for the next request."""

    def end(self, fault: Fault | None = None) -> None:
        self.done, self.fault, self.future, self._read = True, fault, None, None


class AdapterLibrary:
    def __init__(self, options: LoraOptions, targets: Sequence[Target], dtype: torch.dtype, num_pages: int) -> None:
        """`num_pages`: pages on the device. Raises ValueError on a folder that does not exist."""
        self.num_pages = num_pages
        self._options = options
        self._dtype = dtype
        self._targets = {target.path: target for target in targets}
        self._folders = [_existing("lora_folders", folder) for folder in options.lora_folders]
        self._host = HostAdapters(_host_bytes(options, targets, dtype))
        self._threads = ThreadPoolExecutor(options.lora_num_put_workers, "adapters")
        self._ended: Counter[str] = Counter()
        """Loads since the start, by outcome."""
        self._loading: list[Loading] = []
        self._awaited: dict[tuple[str, str], Loading] = {}
        """Loads that requests wait for, by version and path: two ids may have the same version in different folders,
        and the files in one of them may be replaced. The path is empty if the version can only come from an upload."""
        self._unservable: dict[str, Fault] = {}
        """Uploads that cannot be served, by version, with the reason; the latest last."""
        self._uploads = WaitingUploads(self._host, options.lora_num_put_workers, time.monotonic)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prepare(self, adapter: Adapter) -> Loading | None:
        """Load the adapter from its path if it is not in host memory; None if it is. The fault is ADAPTER_MISSING if
        the adapter was uploaded and its files are not here."""
        self.advance()
        self._uploads.on_request(adapter.version)
        if self._host.touch(adapter.version):
            return None
        source = adapter.version, adapter.path
        loading = self._awaited.get(source)
        if loading is not None:
            return loading
        if adapter.path:
            loading = Loading(self.advance, partial(self._read_path, adapter.path, adapter.version), patient=True)
            self._loading.append(loading)
            self._begin_patient()
        else:
            loading = Loading(self.advance, patient=True)
        self._awaited[source] = loading
        self._end_awaited()
        return loading

    def load(self, path: str) -> Loading:
        """Load from a folder on this machine."""
        return self._bounded(partial(self._read_path, path, None))

    def offer(self, version: str, parts: Sequence[bytes]) -> Loading:
        """Load an upload. `parts`: the data of all parts, see `AdapterPart`. The fault is ADAPTER_MISSING if they are
        not the files of this version."""
        return self._bounded(partial(self._read_upload, version, parts), version)

    def rank(self, version: str) -> int | None:
        """The largest rank of an adapter in host memory; None if it is not there."""
        self.advance()
        return self._host[version].rank if version in self._host else None

    @property
    def usage(self) -> HostUsage:
        """For any thread."""
        return HostUsage(len(self._host), self._host.used, self._host.num_bytes, self._host.evictions, self._ended)

    def remove(self, version: str) -> bool:
        """Remove from host memory. False, with no effect: a live request uses it."""
        return self._host.remove(version)

    def acquire(self, version: str) -> None:
        """A request that uses the adapter has begun: do not evict the adapter until it is released."""
        self._host.acquire(version)

    def release(self, version: str) -> None:
        """A request that uses the adapter has ended."""
        self._host.release(version)

    def weights(self, version: str) -> AdapterWeights:
        return self._host[version]

    def pages_of(self, version: str) -> int:
        """Pages that the adapter takes on the device. It must be in host memory."""
        return self._host[version].num_pages(self._options.lora_optimal_adapter_size)

    def prefetch(self) -> list[tuple[str, str]]:
        """Load the adapters in `lora_prefetch_dir`, each in a subfolder, until host memory is full. Returns the folders
        that were skipped, with the reason. Raises ValueError if `lora_prefetch_dir` does not exist."""
        if self._options.lora_prefetch_dir is None:
            return []
        skipped = []
        for folder in sorted(_existing("lora_prefetch_dir", self._options.lora_prefetch_dir).iterdir()):
            if (folder / CONFIG).is_file():
                try:
                    loaded = self._read(read_files(folder, self._targets.values(), self._max_rank))
                except AdapterError as error:
                    skipped.append((str(folder), str(error)))
                    continue
                if self._host.used + loaded.weights.nbytes > self._host.num_bytes:
                    skipped.append((str(folder), "host memory for adapters is full"))
                else:
                    self._host.add(loaded.version, loaded.weights)
        return skipped

    def advance(self) -> None:
        """Store the adapters that the threads have loaded. Never waits."""
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
        """Begin patient loads that fit into host memory or whose size is unknown. One per thread: until an adapter is
        stored, it takes memory in addition to those in the cache."""
        waiting = [loading for loading in self._loading if loading.patient and loading.readable]
        if not waiting:
            return
        reading = sum(loading.patient and loading.future is not None for loading in self._loading)
        room = self._host.room
        fitting = [loading for loading in waiting if loading.nbytes <= room]
        for loading in fitting[: max(0, self._options.lora_num_put_workers - reading)]:
            loading.begin(self._threads)

    def _end_awaited(self) -> None:
        """End the waits for versions that are in host memory now, from any source, and for uploads that are not
        here."""
        reading = any(not (loading.patient or loading.done) for loading in self._loading)
        for (version, path), loading in self._awaited.items():
            if version in self._host:
                loading.end()
            elif not (path or reading or version in self._uploads):
                fault = self._unservable.get(version)
                if fault is None:
                    fault = _fault(ErrorCode.ADAPTER_MISSING, "this engine does not have its uploaded files")
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
            # Another engine may still have the right files.
            loading.end(_fault(ErrorCode.ADAPTER_MISSING, str(error)))
            return
        except AdapterError as error:
            fault = _fault(ErrorCode.INVALID_ARGUMENT, f"the adapter cannot be served: {error}")
            if loading.uploaded:
                self._remember_unservable(loading.uploaded, fault)
            loading.end(fault)
            return
        except Exception as error:  # noqa: BLE001 - the waiting requests must end on any error
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

    def _remember_unservable(self, version: str, fault: Fault) -> None:
        self._unservable[version] = fault
        while len(self._unservable) > MAX_UNSERVABLE:
            del self._unservable[next(iter(self._unservable))]

    def _bounded(self, read: Callable[[], Loaded], uploaded: str = "") -> Loading:
        self.advance()
        if sum(not loading.patient for loading in self._loading) >= MAX_LOADING:
            refused = Loading(self.advance)
            refused.end(_fault(ErrorCode.OVERLOADED, f"{MAX_LOADING} adapters are being loaded"))
            return refused
        loading = Loading(self.advance, read, uploaded=uploaded)
        loading.begin(self._threads)
        self._loading.append(loading)
        return loading

    def _read_path(self, path: str, version: str | None) -> Loaded:
        """Runs in a loading thread."""
        folder = self._resolve_allowed(path)
        files = read_files(folder, self._targets.values(), self._max_rank)
        if version is not None and files.version != version:
            raise OtherFilesError(f"the files in {path} have changed since the adapter was loaded")
        return self._read(files)

    def _read_upload(self, version: str, parts: Sequence[bytes]) -> Loaded:
        """Runs in a loading thread."""
        try:
            files = join_parts(parts)
        except msgspec.DecodeError as error:
            raise OtherFilesError(f"the upload is malformed: {error}") from error
        if files.version != version:
            raise OtherFilesError("the uploaded files are not those of this version")
        return self._read(files)

    def _resolve_allowed(self, path: str) -> Path:
        """The path with symbolic links resolved. Raises AdapterError if it is not within one of `lora_folders`."""
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise AdapterError(f"{path!r} is not a folder: {error}") from error
        if not self._folders:
            upload = "upload it instead (sluice lora load ID --upload FOLDER)"
            raise AdapterError(f"{path!r} is a folder of the engine, but lora_folders is empty: {upload}")
        if not any(folder.is_relative_to(allowed) for allowed in self._folders):
            raise AdapterError(f"{path!r} is not within one of lora_folders")
        return folder

    def _read(self, files: AdapterFiles) -> Loaded:
        weights = read_adapter(files, self._targets, self._max_rank, self._dtype)
        pages = weights.num_pages(self._options.lora_optimal_adapter_size)
        if pages > self.num_pages:
            raise AdapterError(
                f"it needs {pages} pages of the device's memory for adapters, which has {self.num_pages}"
            )
        if weights.nbytes > self._host.num_bytes:
            raise AdapterError(
                f"it needs {weights.nbytes} bytes; the host memory for all adapters is {self._host.num_bytes} "
                "(lora_host_cache_size)"
            )
        return Loaded(files.version, weights)


def _fault(code: ErrorCode, message: str) -> Fault:
    return Fault(code.name, message, "spec.lora_id")


def make_library(
    adapters: DeviceAdapters | None, options: LoraOptions, dtype: torch.dtype, warn: Callable[[str, str], None]
) -> AdapterLibrary | None:
    """The library of a forward pass's adapters, with those of `lora_prefetch_dir`; None if it serves none. Raises
    ValueError on a folder that does not exist. `warn`: called with a log event and a reason."""
    if adapters is None:
        return None
    library = AdapterLibrary(options, adapters.targets, dtype, adapters.num_pages)
    for folder, reason in library.prefetch():
        warn("adapter_skipped", f"{folder}: {reason}")
    return library


def _host_bytes(options: LoraOptions, targets: Sequence[Target], dtype: torch.dtype) -> int:
    ranks = options.lora_num_host_module_layer
    if ranks is None:
        return options.lora_host_cache_size
    # Adapters in host memory are whole, not split over ranks.
    return ranks * max(target.inputs.total + target.outputs.total for target in targets) * dtype.itemsize


def _existing(setting: str, folder: str) -> Path:
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ValueError(f"{setting}: {folder} is not a folder")
    return path
