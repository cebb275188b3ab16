"""Runners whose host pool is a file, as on a GPU; here with device = cpu."""

from pathlib import Path

import pytest
import torch

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner import load, memory
from engine_worker.runner.config import DraftConfig, RunnerConfig
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.load import load_runner, usable_folder
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Move, MoveKind
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from tests.fakes.engine import EngineBench

PROMPT = [(7 * number) % 90 + 3 for number in range(70)]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(load, "file_is_on_host", lambda device: True)


def loaded(folder: Path, name: str = "a", draft: DraftConfig | None = None, **options) -> ModelRunner:
    settings = {"kv_cache_tokens": 160, "kv_host_memory": 4 << 20, "tokens_per_block": 16, "threads": 1}
    config = RunnerConfig("cpu", **(settings | options))
    extensions = Extensions(pool_folder=PoolFolder(folder, name, print))
    checkpoint = open_checkpoint(str(tiny_model.path()))
    return load_runner(checkpoint, config, lambda *_: None, draft=draft, extensions=extensions)


def generated(runner: ModelRunner) -> tuple[EngineBench, list[int]]:
    bench = EngineBench(runner=runner)
    number = bench.submit(PROMPT, max_tokens=12)
    bench.run()
    return bench, bench.output(number)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_twin_and_the_next_engine_continue_with_copied_blocks(shared_memory: Path, overlap: bool):
    runner = loaded(shared_memory, overlap=overlap)
    assert runner.choices["kv_file_pool"] == "host"
    _, expected = generated(runner)
    twin, output = generated(loaded(shared_memory, "b", overlap=overlap))
    assert output == expected
    # The prompt has 4 blocks and 6 tokens, and the output fills another block.
    assert twin.cache.fetches.fetched == 4
    assert twin.engine.stats.context_tokens == 6
    runner.pool_file.close()
    following, output = generated(loaded(shared_memory, overlap=overlap))
    assert output == expected
    assert following.cache.tiers.adopted == 5
    assert following.engine.stats.context_tokens == 6


def test_the_sums_in_the_file_are_those_of_the_device(shared_memory: Path, monkeypatch):
    """Reading each copy again would take the engine's thread longer than the copy."""
    runner = loaded(shared_memory)
    file = runner.pool_file
    with monkeypatch.context() as patch:
        patch.setattr(PoolFile, "sum", None)
        generated(runner)
    assert file.num_valid == 5
    assert all(file._entries[block]["sum"] == file.sum(block) for block in range(5))


def test_the_draft_models_host_blocks_are_in_no_file(shared_memory: Path):
    draft = DraftConfig(open_checkpoint(str(tiny_model.path())), 8)
    runner = loaded(shared_memory, draft=draft)
    own = runner.pool_file.num_blocks
    assert runner.num_host_blocks == own == (4 << 20) // (2 * runner.pool_file.layout.block_bytes)
    assert runner._drafter._forward.cache.take_saved() is None
    runner._drafter.move((Move(MoveKind.SAVE, 0, 0),))
    assert runner._drafter._forward.cache.take_saved() is None
    _, expected = generated(loaded(shared_memory, "b"))
    _, output = generated(runner)
    assert output == expected


def test_the_host_pool_has_the_size_of_the_adopted_file(shared_memory: Path, monkeypatch):
    first = loaded(shared_memory)
    first.pool_file.close()
    # Its memory is in use already.
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    following = loaded(shared_memory)
    assert following.pool_file.path == first.pool_file.path
    assert following.num_host_blocks == first.num_host_blocks


def test_another_size_of_the_host_pool_begins_empty(shared_memory: Path):
    first = loaded(shared_memory)
    first.pool_file.close()
    assert loaded(shared_memory, kv_host_memory=2 << 20).num_host_blocks == first.num_host_blocks // 2


def test_a_folder_without_host_memory_is_refused_on_a_gpu(shared_memory: Path):
    with pytest.raises(ValueError, match=r"^kv_folder: .* kv_host_memory, too \(got 0\)$"):
        loaded(shared_memory, kv_host_memory=0, kv_folder=str(shared_memory))


def test_the_launchers_folder_is_not_used_without_host_memory(shared_memory: Path):
    runner = loaded(shared_memory, kv_host_memory=0, default_kv_folder=str(shared_memory))
    assert runner.pool_file is None
    assert "kv_file" not in runner.choices
    assert list(shared_memory.iterdir()) == []


def test_only_on_a_gpu_the_file_is_on_the_host(monkeypatch):
    monkeypatch.undo()
    assert load.file_is_on_host(CUDA)
    assert not load.file_is_on_host(CPU)
    assert usable_folder(RunnerConfig("cuda", kv_folder="none"), CUDA, None) is None
