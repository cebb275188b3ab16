"""The library of adapters: loads folders and uploads in threads, and shares their weights between requests."""

import io
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from threading import Event

import pytest
import structlog
import torch

from engine_worker.ringside.adapters import Adapters
from sluice.wire.adapters import Adapter, AdapterFiles, AdapterLoaded, LoadAdapter, join_parts, parts_of
from sluice.wire.errors import FinishReason
from tests.engine_worker.lora.engines import ended, finish, held, lora_engine, lora_runner, offer, submit
from tests.engine_worker.lora.oracle import adapter_of, files_of
from tests.engine_worker.lora.test_checkpoint import zip_of_zeros
from tests.fakes.lanes import until
from tests.fakes.pickles import NAMES as PICKLES
from tests.fakes.pickles import Trap
from tests.fakes.processes import LIMIT

PROMPT = list(range(3, 20))


def test_loads_a_folder(library, tuned):
    loading = ended(library.load(str(tuned[1])))
    assert (loading.fault, loading.version, loading.rank) == (None, files_of(tuned[1]).version, 12)
    assert held(library) == [loading.version]
    assert library.rank(loading.version) == 12
    assert library.prepare(adapter_of(tuned[1])) is None
    assert library.remove(loading.version)
    assert library.rank(loading.version) is None


def test_loads_an_upload(library, tuned):
    missing = library.prepare(adapter_of(tuned[0], by_path=False))
    assert missing.done
    assert missing.fault.code == "ADAPTER_MISSING"
    assert ended(offer(library, files_of(tuned[0]))).fault is None
    assert library.prepare(adapter_of(tuned[0], by_path=False)) is None


def test_a_request_waits_for_an_upload_that_is_being_read(library, tuned):
    busy = Event()
    library._threads.submit(busy.wait)
    offered = offer(library, files_of(tuned[0]))
    uploaded, missing = (library.prepare(adapter_of(folder, by_path=False)) for folder in tuned[:2])
    assert not uploaded.poll()
    busy.set()
    assert ended(uploaded).fault is None
    assert offered.done
    assert ended(missing).fault.code == "ADAPTER_MISSING"
    library.advance()
    assert library.prepare(adapter_of(tuned[1], by_path=False)).fault.code == "ADAPTER_MISSING"


def test_no_step_waits_for_an_upload_that_is_decoded(model, tuned, monkeypatch):
    decoded, sent = Event(), []
    monkeypatch.setattr(
        "engine_worker.lora.library.join_parts", lambda parts: decoded.wait(LIMIT) and join_parts(parts)
    )
    bench, files = lora_engine(model), files_of(tuned[0])
    desk = Adapters(bench.runner.adapters, 7, lambda *each: sent.append(each), structlog.get_logger())
    plain = submit(bench, PROMPT, None)
    for message in (*parts_of(files, 7), LoadAdapter(7, 1, "router", version=files.version)):
        desk.on_message(message)
    waiting = submit(bench, PROMPT, adapter_of(tuned[0], by_path=False))
    while bench.step() or not bench.stream(plain).tokens:
        desk.finish()
    assert bench.ended(plain) == FinishReason.LENGTH
    assert not decoded.is_set()
    assert desk.pending
    assert not sent
    decoded.set()
    finish(bench)
    desk.finish()
    assert bench.ended(waiting) == FinishReason.LENGTH
    assert sent == [("router", AdapterLoaded(7, 1, files.version, 4))]


def test_an_upload_of_other_files_is_rejected(library, tuned):
    parts = [part.data for part in parts_of(files_of(tuned[0]), 1)]
    for version, data in ((files_of(tuned[1]).version, parts), ("0" * 32, [b"\xc1"])):
        assert ended(library.offer(version, data)).fault.code == "ADAPTER_MISSING"
    assert held(library) == []


def test_requests_for_the_same_version_share_one_load(library, tuned):
    busy = Event()
    library._threads.submit(busy.wait)
    first, second = (library.prepare(adapter_of(tuned[0], name)) for name in ("a", "b"))
    assert first is second
    busy.set()
    assert ended(first).fault is None


@pytest.mark.parametrize("replaced", [0, 1])
@pytest.mark.parametrize("how", ["others", "none"])
def test_two_ids_of_one_version_need_only_their_own_folders(library, tuned, model, replaced, how):
    folders = [Path(tempfile.mkdtemp(dir=model.parent)) / name for name in "ab"]
    for folder in folders:
        shutil.copytree(tuned[0], folder)
    adapters = [adapter_of(folder, folder.name) for folder in folders]
    busy = Event()
    library._threads.submit(busy.wait)
    loads = [library.prepare(adapter) for adapter in adapters]
    shutil.rmtree(folders[replaced])
    if how == "others":
        shutil.copytree(tuned[1], folders[replaced])
    busy.set()
    assert ended(loads[1 - replaced]).fault is None
    assert held(library) == [adapters[0].version]
    assert [library.prepare(adapter) for adapter in adapters] == [None, None]


def test_an_id_with_a_folder_does_not_wait_for_an_upload_of_the_same_version(library, tuned):
    busy = Event()
    library._threads.submit(busy.wait)
    offer(library, files_of(tuned[1]))
    _, by_path = (library.prepare(adapter_of(tuned[0], by_path=each)) for each in (False, True))
    busy.set()
    assert ended(by_path).fault is None


def test_a_changed_folder_is_rejected(library, tuned):
    adapter = adapter_of(tuned[0])
    changed = Adapter("tuned", "0" * 32, adapter.path)
    fault = ended(library.prepare(changed)).fault
    assert fault.code == "ADAPTER_MISSING"
    assert "have changed" in fault.message


@pytest.mark.parametrize("how", ["elsewhere", "dots", "link", "nul", "long", "absent"])
def test_paths_outside_of_the_folders_are_rejected(library, tuned, tmp_path, model, how):
    shutil.copytree(tuned[0], tmp_path / "copy")
    link = model.parent / f"link{os.getpid()}"
    if not link.is_symlink():
        link.symlink_to(tmp_path / "copy")
    path = {
        "elsewhere": str(tmp_path / "copy"),
        "dots": f"{model.parent}/../{tmp_path.name}/copy",
        "link": str(link),
        "nul": f"{tuned[0]}\0",
        "long": f"{model.parent}/" + "x" * 5000,
        "absent": str(model.parent / "absent"),
    }[how]
    assert ended(library.load(path)).fault.code == "INVALID_ARGUMENT"
    assert held(library) == []


def test_without_folders_the_error_says_to_upload(tuned, model):
    fault = ended(lora_runner(model, lora_folders=()).adapters.load(str(tuned[0]))).fault
    assert fault.code == "INVALID_ARGUMENT"
    assert "lora_folders is empty: upload it instead (sluice lora load ID --upload FOLDER)" in fault.message


@pytest.fixture
def trap(tmp_path):
    trap = Trap(tmp_path)
    # The trap works.
    for run in (
        lambda: pickle.loads(trap.pickled),
        lambda: torch.load(io.BytesIO(trap.saved), weights_only=False),
    ):
        run()
        assert trap.sprung
        trap.rearm()
    return trap


@pytest.mark.parametrize("kind", ["empty", "zeros", "large", "pickled", "saved", "zipped", "pickled configuration"])
def test_a_hostile_upload_leaves_nothing_behind(library, tuned, trap, kind):
    good, sent = files_of(tuned[0]), []
    files = {
        "empty": AdapterFiles(good.config, b""),
        "zeros": AdapterFiles(good.config, zip_of_zeros()),
        "large": AdapterFiles(good.config, bytes(30 << 20)),
        "pickled": AdapterFiles(good.config, trap.pickled),
        "saved": AdapterFiles(good.config, trap.saved),
        "zipped": AdapterFiles(good.config, trap.zipped),
        "pickled configuration": AdapterFiles(trap.pickled, good.weights),
    }[kind]
    desk = Adapters(library, 7, lambda *each: sent.append(each), structlog.get_logger())
    for message in (*parts_of(files, 7), LoadAdapter(7, 1, "router", version=files.version)):
        desk.on_message(message)
    until(lambda: desk.finish() or not desk.pending)
    ((_, answer),) = sent
    assert (answer.version, answer.fault.code) == ("", "INVALID_ARGUMENT")
    assert ("adapter_config.json" if "configuration" in kind else "adapter_model.safetensors") in answer.fault.message
    assert held(library) == []
    assert library.usage.used_bytes == 0
    assert desk.changes_since(0) is None
    # A request with this upload ends with the same error.
    assert library.prepare(Adapter("x", files.version)).fault == answer.fault
    assert not trap.sprung


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_in_a_folder_are_not_read(library, model, tuned, trap, name):
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    shutil.copy(tuned[0] / "adapter_config.json", folder)
    (folder / name).write_bytes(trap.files[name])
    fault = ended(library.load(str(folder))).fault
    assert fault.code == "INVALID_ARGUMENT"
    assert ("is a pickle" in fault.message) == (name == "adapter_model.bin")
    assert held(library) == []
    # Pickles next to the weights are not read either.
    trap.write(folder)
    shutil.copy(tuned[0] / "adapter_model.safetensors", folder)
    assert ended(library.load(str(folder))).fault is None
    assert not trap.sprung


def test_prefetching(model, tuned, tmp_path):
    shutil.copytree(tuned[0], tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text("{}")
    library = lora_runner(model, lora_prefetch_dir=str(tmp_path)).adapters
    assert held(library) == [files_of(tuned[0]).version]


def test_without_lora_adapters_are_rejected(model, tuned):
    bench = lora_engine(model, lora=False)
    number = submit(bench, PROMPT, adapter_of(tuned[0]))
    finish(bench)
    assert bench.fault(number) == "INVALID_ARGUMENT"


def test_a_request_whose_adapter_cannot_be_loaded_ends_with_the_reason(model, tuned):
    bench = lora_engine(model)
    bad = submit(bench, PROMPT, Adapter("x", "0" * 32, str(tuned[0])))
    good = submit(bench, PROMPT, adapter_of(tuned[0]))
    plain = submit(bench, PROMPT, None)
    finish(bench)
    assert bench.fault(bad) == "ADAPTER_MISSING"
    assert bench.ended(good) == bench.ended(plain) == FinishReason.LENGTH


def test_a_cancelled_request_does_not_keep_its_adapter(model, tuned):
    bench = lora_engine(model)
    number = submit(bench, PROMPT, adapter_of(tuned[0]), max_tokens=300)
    # Cancel it once its adapter is loaded.
    until(lambda: bench.step() and bench.engine.cache.holders)
    version = files_of(tuned[0]).version
    assert not bench.runner.adapters.remove(version)
    bench.cancel(number)
    finish(bench)
    assert bench.runner.adapters.remove(version)
