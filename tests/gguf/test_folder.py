"""Folders of GGUF files: the bundled model, written as one, is the bundled model."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from bench.harness.models import TINY
from bench.systems.llama_gguf import main as write_gguf
from sluice.checkpoint import gguf
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.checkpoint.gguf import read_gguf
from sluice.checkpoint.servable import check_servable
from sluice.checkpoint.weight_files import GGUF, check_weight_files
from sluice.cli.commands import app
from sluice.gguf.folder import convert, gguf_folder, is_gguf
from sluice.launch import Ring


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["llama_gguf", str(TINY), str(file), "float32"])
        write_gguf()
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sluice" / "gguf"


def test_the_folder_is_a_checkpoint_whose_weights_are_the_file(tiny_gguf, cache):
    folder = gguf_folder(str(tiny_gguf))
    assert folder.parent == cache
    assert (folder / GGUF).resolve() == tiny_gguf.resolve()
    found, original = open_checkpoint(str(folder)), open_checkpoint(str(TINY))
    check_servable(found)
    check_weight_files(found.path)
    assert found.chat_template == original.chat_template
    assert {*found.eos_token_ids} == {*original.eos_token_ids}
    assert found.max_context_tokens == original.max_context_tokens
    for name in ("hidden_size", "num_hidden_layers", "head_dim", "tie_word_embeddings", "architectures"):
        assert found.config[name] == original.config[name]
    tokenizers = [Tokenizer.from_file(str(each.tokenizer_file)) for each in (found, original)]
    assert len({tuple(each.encode("Hello, 123 wörld").ids) for each in tokenizers}) == 1


def test_the_folder_is_written_once(tiny_gguf, cache):
    with ThreadPoolExecutor() as threads:
        folders = set(threads.map(gguf_folder, [str(tiny_gguf)] * 3))
    (folder,) = folders
    written = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(str(tiny_gguf)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert [each.name for each in cache.iterdir()] == [folder.name]


def test_a_start_parses_the_header_once(tiny_gguf, cache, monkeypatch):
    gguf_folder(str(tiny_gguf))
    gguf._parsed.cache_clear()
    parsed = []
    monkeypatch.setattr(gguf, "read_gguf", lambda file: parsed.append(file) or read_gguf(file))
    checkpoint = open_checkpoint(str(gguf_folder(str(tiny_gguf))))
    check_weight_files(checkpoint.path)
    assert parsed == [tiny_gguf]


def test_a_file_that_has_moved(tiny_gguf, cache, tmp_path):
    first, moved = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for file in (first, moved):
        file.parent.mkdir()
    first.write_bytes(tiny_gguf.read_bytes())
    folder = gguf_folder(str(first))
    first.rename(moved)
    assert gguf_folder(str(moved)) == folder
    assert (folder / GGUF).resolve() == moved.resolve()


def test_a_folder_with_one_gguf_file(tiny_gguf, cache, tmp_path):
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    (downloaded / "m.gguf").symlink_to(tiny_gguf)
    assert is_gguf(str(downloaded))
    assert gguf_folder(str(downloaded)).parent == cache
    (downloaded / "other.gguf").symlink_to(tiny_gguf)
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files: name one of them, such as .*m\.gguf"):
        is_gguf(str(downloaded))
    assert not is_gguf(str(TINY))
    assert not is_gguf("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("link", [False, True])
def test_the_command(tiny_gguf, tmp_path, link):
    folder = tmp_path / "made" / "tiny"
    arguments = ["convert", str(tiny_gguf), str(folder), *(["--link"] if link else [])]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (folder / GGUF).is_symlink() == link
    assert (folder / GGUF).read_bytes() == tiny_gguf.read_bytes()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_nothing_is_left_of_a_file_that_is_not_supported(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(CheckpointError, match=r"a\.gguf has version 0 of GGUF"):
        convert(tmp_path / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_folder_has_a_fingerprint_of_its_own(tiny_gguf, cache, tmp_path):
    folder = gguf_folder(str(tiny_gguf))
    data = bytearray(tiny_gguf.read_bytes())
    # The middle of a tensor, of which a sample is hashed.
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    other = tmp_path / "tiny-F32.gguf"
    other.write_bytes(data)
    changed = gguf_folder(str(other))
    assert changed != folder
    assert open_checkpoint(str(changed)).fingerprint != open_checkpoint(str(folder)).fingerprint
    assert json.loads((changed / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_a_ring_serves_the_file_by_its_name(tiny_gguf, cache):
    plan = Ring(tiny_gguf).plan
    assert (plan.model, plan.name) == (str(gguf_folder(str(tiny_gguf))), "tiny-F32")
    assert Ring(str(tiny_gguf), name="tiny").plan.name == "tiny"
