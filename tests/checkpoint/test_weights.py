"""Weight files are found and checked for completeness."""

import json
from pathlib import Path

import pytest

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.weight_files import INDEX, SINGLE, check_weight_files, weight_files
from sluice.tiny_model import path


def safetensors(size: int = 64) -> bytes:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def sharded(folder: Path, *names: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_weight_files(folder)
    return str(caught.value)


def test_complete_files_are_accepted(tmp_path) -> None:
    check_weight_files(path())
    sharded(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors())
    check_weight_files(tmp_path)
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_missing_shards_are_listed(tmp_path) -> None:
    sharded(tmp_path, *(f"{i}.safetensors" for i in range(8)))
    (tmp_path / "0.safetensors").write_bytes(safetensors())
    error = refusal(tmp_path)
    assert "has 1 of the 8 weight files of its index; missing: 1.safetensors, " in error
    assert "5.safetensors and 2 more" in error


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": []}}']
)
def test_an_invalid_index_is_named(tmp_path, index) -> None:
    (tmp_path / INDEX).write_text(index)
    assert INDEX in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "after 0 bytes"),
        (safetensors()[:5], "after 5 bytes"),
        (safetensors()[:30], "after 30 bytes"),
        (safetensors()[:-1], f"has {len(safetensors()) - 1} bytes instead of {len(safetensors())}"),
        (safetensors() + b"x", "as its header says"),
        ((8).to_bytes(8, "little") + b"not JSON", "no valid safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "no valid safetensors header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_truncated_or_invalid_file_is_named(tmp_path, content, named) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    error = refusal(tmp_path)
    assert str(tmp_path / SINGLE) in error
    assert named in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("model-q4.gguf", "GGUF"),
        ("README.md", "neither model.safetensors nor"),
    ],
)
def test_other_formats_are_named(tmp_path, file, named) -> None:
    (tmp_path / file).touch()
    assert named in refusal(tmp_path)
