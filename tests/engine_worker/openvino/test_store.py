import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from engine_worker.openvino import weights
from engine_worker.openvino.weights import FileStore, open_store
from sluice import tiny_model
from tests.engine_worker.formats.checkpoints import write_pair
from tests.engine_worker.openvino.loaded import load
from tests.engine_worker.runner.generate import generate

VALUES = np.arange(1 << 19, dtype=np.int32).reshape(512, -1)


def resident(folder: Path) -> int:
    """KiB of mapped files in this folder that are in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.fixture(autouse=True)
def ignore_free_disk_space(monkeypatch):
    monkeypatch.setattr(weights, "MIN_FREE_DISK_BYTES", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_pages_leave_memory_and_are_read_back(tmp_path):
    file_store = FileStore(tmp_path)
    arrays = [file_store.keep(VALUES), file_store.keep(VALUES + 1)]
    assert resident(tmp_path) > VALUES.nbytes >> 10
    file_store.release()
    assert resident(tmp_path) == 0
    assert np.array_equal(arrays[0], VALUES)
    assert np.array_equal(arrays[1], VALUES + 1)
    assert file_store.summary == f"in a file in {tmp_path}"


def test_the_file_has_no_name(tmp_path):
    file_store = FileStore(tmp_path / "new")
    file_store.keep(VALUES)
    assert list((tmp_path / "new").iterdir()) == []


def test_if_the_folder_cannot_be_created_arrays_stay_in_memory(tmp_path):
    (tmp_path / "file").touch()
    file_store = open_store(str(tmp_path / "file"))
    assert file_store.keep(VALUES) is VALUES
    file_store.release()
    assert file_store.summary == f"in memory: in a file in {tmp_path}/file failed: File exists"


def test_on_a_full_disk_arrays_stay_in_memory(tmp_path, monkeypatch):
    file_store = FileStore(tmp_path)
    first = file_store.keep(VALUES)
    monkeypatch.setattr(weights, "MIN_FREE_DISK_BYTES", 1 << 62)
    assert file_store.keep(VALUES) is VALUES
    file_store.release()
    assert np.array_equal(first, VALUES)
    assert file_store.summary == f"in memory: in a file in {tmp_path} failed: the disk is nearly full"


@pytest.mark.parametrize("in_file", [False, True])
def test_codes_that_the_checkpoint_has_as_they_are_need_no_other_memory(tmp_path, monkeypatch, in_file):
    """Only the rows of queries, keys and values, which are not neighbours in the file, are copied into one matrix."""
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 1)
    quantized, _ = write_pair(tmp_path, "llama", "compressed-tensors, int8", excluded=())
    runner = load(quantized, weights_folder=str(tmp_path / "weights") if in_file else None)
    config = json.loads((quantized / "config.json").read_text())
    hidden, layers, kv = config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]
    heads = config["num_attention_heads"]
    arrays = runner._forward.rank.model.store._arrays
    (file,) = runner._forward.rank.model.store._files.values()
    elsewhere = [array for address, array in arrays.items() if not file.holds(address)]
    codes = sum(array.nbytes for array in elsewhere if array.dtype == np.int8)
    assert codes == layers * hidden * (heads + 2 * kv) * hidden // heads
    where = f"in a file in {tmp_path / 'weights'}" if in_file else "in memory"
    assert runner.choices["weights"] == f"{where}, and in the checkpoint's files"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_checkpoint_are_released_too(tmp_path):
    quantized, _ = write_pair(tmp_path, "llama", "compressed-tensors, int8", excluded=())
    store = load(quantized)._forward.rank.model.store
    assert resident(quantized) == 0
    stored = load_file(quantized / "model.safetensors")
    down = stored["model.layers.1.mlp.down_proj.weight"].numpy()
    assert any(np.array_equal(array, down) for array in store._arrays.values())
    assert resident(quantized) > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_weights_in_a_file_do_not_change_the_tokens(tmp_path, monkeypatch, quantize):
    prompts = [[1, 2, 3], list(range(70))]
    expected = generate(load(tiny_model.path(), quantize=quantize), prompts, 8, temperature=0.0)
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 1)
    runner = load(tiny_model.path(), quantize=quantize, weights_folder=str(tmp_path))
    assert runner.choices["weights"] == f"in a file in {tmp_path}"
    assert generate(runner, prompts, 8, temperature=0.0) == expected
