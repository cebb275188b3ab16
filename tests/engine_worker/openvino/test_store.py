import sys
from pathlib import Path

import numpy as np
import pytest

from engine_worker.openvino import store
from engine_worker.openvino.store import FileStore, open_store
from sluice import tiny_model
from tests.engine_worker.openvino.loaded import load
from tests.engine_worker.runner.generate import generate

VALUES = np.arange(1 << 19, dtype=np.int32).reshape(512, -1)


def resident(folder: Path) -> int:
    """KiB in memory of files in this folder."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.fixture(autouse=True)
def any_disk(monkeypatch):
    monkeypatch.setattr(store, "LEFT_FREE", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_pages_leave_the_memory_and_return(tmp_path):
    kept = FileStore(tmp_path)
    arrays = [kept.keep(VALUES), kept.keep(VALUES + 1)]
    assert resident(tmp_path) > VALUES.nbytes >> 10
    kept.release()
    assert resident(tmp_path) == 0
    assert np.array_equal(arrays[0], VALUES)
    assert np.array_equal(arrays[1], VALUES + 1)
    assert kept.summary == f"in a file in {tmp_path}"


def test_the_file_has_no_name(tmp_path):
    kept = FileStore(tmp_path / "new")
    kept.keep(VALUES)
    assert list((tmp_path / "new").iterdir()) == []


def test_without_a_folder_arrays_stay_where_they_are(tmp_path):
    (tmp_path / "file").touch()
    kept = open_store(str(tmp_path / "file"))
    assert kept.keep(VALUES) is VALUES
    kept.release()
    assert kept.summary == f"in memory: in a file in {tmp_path}/file failed: File exists"


def test_on_a_full_disk_arrays_stay_where_they_are(tmp_path, monkeypatch):
    kept = FileStore(tmp_path)
    first = kept.keep(VALUES)
    monkeypatch.setattr(store, "LEFT_FREE", 1 << 62)
    assert kept.keep(VALUES) is VALUES
    kept.release()
    assert np.array_equal(first, VALUES)
    assert kept.summary == f"in memory: in a file in {tmp_path} failed: the disk is nearly full"


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_an_engine_with_its_weights_in_a_file(tmp_path, monkeypatch, quantize):
    prompts = [[1, 2, 3], list(range(70))]
    expected = generate(load(tiny_model.path(), quantize=quantize), prompts, 8, temperature=0.0)
    monkeypatch.setattr(store, "LEAST_BYTES", 1)
    runner = load(tiny_model.path(), quantize=quantize, weights_folder=str(tmp_path))
    assert runner.choices["weights"] == f"in a file in {tmp_path}"
    assert generate(runner, prompts, 8, temperature=0.0) == expected
