"""The library's host memory: what it evicts, what waits for room, and what is rejected."""

import gc
import time
import weakref

import pytest

from engine_worker.lora.checkpoint import read_adapter
from tests.engine_worker.lora.engines import ended, held, lora_runner, offer
from tests.engine_worker.lora.oracle import adapter_of, files_of, write_adapter
from tests.fakes.lanes import until


def test_ten_thousand_loads_are_bounded(library, tuned):
    loads = [library.load(str(tuned[i % 3])) for i in range(10_000)]
    refused = [loading for loading in loads if loading.done and loading.fault is not None]
    assert refused
    assert {loading.fault.code for loading in refused} == {"OVERLOADED"}
    assert all(ended(loading) for loading in loads)
    assert len(library._loading) == 0
    assert set(held(library)) <= {files_of(folder).version for folder in tuned}


def test_an_adapter_in_use_is_neither_removed_nor_evicted(model, tuned):
    weights = lora_runner(model).adapters
    loaded = [ended(weights.load(str(folder))) for folder in tuned]
    sizes = [weights.weights(loading.version).nbytes for loading in loaded]
    library = lora_runner(model, lora_host_cache_size=sizes[2] + sizes[1] - 1).adapters
    first = ended(library.load(str(tuned[1]))).version
    library.acquire(first)
    assert not library.remove(first)
    assert ended(library.load(str(tuned[2]))).fault.code == "OVERLOADED"
    loading = library.prepare(adapter_of(tuned[2]))
    time.sleep(0.2)
    assert not loading.poll()
    assert held(library) == [first]
    library.release(first)
    assert ended(loading).fault is None
    assert held(library) == [files_of(tuned[2]).version]


@pytest.fixture
def full(model, tuned):
    """A library with room for one adapter, which is in use, and that adapter's version."""
    roomy = lora_runner(model).adapters
    ended(roomy.load(str(tuned[2])))
    library = lora_runner(model, lora_host_cache_size=roomy.usage.used_bytes).adapters
    version = ended(library.load(str(tuned[2]))).version
    library.acquire(version)
    return library, version


def test_adapters_that_wait_for_host_memory_take_no_memory(full, model, tuned, monkeypatch):
    library, first = full
    references: dict[str, weakref.ref] = {}

    def read(files, *rest):
        weights = read_adapter(files, *rest)
        references[files.version] = weakref.ref(weights.modules[0].a)
        return weights

    monkeypatch.setattr("engine_worker.lora.library.read_adapter", read)
    folders = [write_adapter(model.parent / f"waiting{i}", model, i, rank=4) for i in range(5)]
    waiting = [library.prepare(adapter_of(folder)) for folder in folders]
    until(lambda: waiting[0].poll() or len(references) == len(folders))
    library._threads.submit(int).result()
    assert not any(each.poll() for each in waiting)
    gc.collect()
    assert not any(weights() is not None for weights in references.values())
    library.release(first)
    for loading in waiting:
        assert ended(loading).fault is None


def test_a_request_waits_with_its_upload_for_host_memory(full, tuned):
    library, first = full
    for folder in tuned[:2]:
        assert ended(offer(library, files_of(folder))).fault.code == "OVERLOADED"
    loading, missing = (library.prepare(adapter_of(folder, by_path=False)) for folder in tuned[:2])
    assert not loading.poll()
    assert not missing.poll()
    library.release(first)
    assert ended(loading).fault is None
    # Only one upload per thread is kept; routers send the others again.
    assert ended(missing).fault.code == "ADAPTER_MISSING"
    assert ended(offer(library, files_of(tuned[1]))).fault is None


def test_requests_with_more_uploads_than_are_kept_wait_for_their_turn(full, model):
    library, version = full
    # As large as the adapter in use, so there is room for one at a time.
    folders = [write_adapter(model.parent / f"turn{i}", model, 10 + i, rank=20) for i in range(4)]
    for folder in folders:
        assert ended(offer(library, files_of(folder))).fault.code == "OVERLOADED"
    adapters = [adapter_of(folder, by_path=False) for folder in folders]
    waiting = {adapter.version: library.prepare(adapter) for adapter in adapters}
    for adapter in adapters:
        library.acquire(adapter.version)
    library.release(version)
    for folder, adapter in zip(folders, adapters, strict=True):
        fault = ended(waiting.pop(adapter.version)).fault
        if fault is not None:
            # The request ends; the router sends the files, then submits the request again.
            assert fault.code == "ADAPTER_MISSING"
            library.release(adapter.version)
            assert ended(offer(library, files_of(folder))).fault is None
            assert not any(loading.poll() for loading in waiting.values())
            assert library.prepare(adapter) is None
            library.acquire(adapter.version)
        assert held(library) == [adapter.version]
        assert not any(loading.poll() for loading in waiting.values())
        library.release(adapter.version)


def test_an_adapter_that_never_fits_is_rejected(model, tuned):
    for options in ({"lora_host_cache_size": 1000}, {"lora_num_device_module_layer": 16}):
        library = lora_runner(model, **options).adapters
        assert ended(library.load(str(tuned[0]))).fault.code == "INVALID_ARGUMENT"
