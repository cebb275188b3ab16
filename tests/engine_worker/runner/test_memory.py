from functools import partial

import pytest
import torch

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner import memory
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.memory import (
    MemoryTooSmallError,
    PoolSizes,
    count_blocks,
    count_host_blocks,
    free_memory,
    size_pools,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def count(free=1 << 30, block_bytes=1 << 16, max_context=1 << 30, device=CPU, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device: free)
        return count_blocks(RunnerConfig(**{"tokens_per_block": 16, **options}), block_bytes, 2, max_context, device)


def count_host(memory_free=1 << 30, block_bytes=1 << 16, num_blocks=100, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device: memory_free)
        return count_host_blocks(RunnerConfig(**{"tokens_per_block": 16, **options}), block_bytes, num_blocks, CPU)


def test_by_tokens():
    assert count(kv_cache_tokens=160) == 10
    assert count(kv_cache_tokens=161, tokens_per_block=8) == 20


def test_by_memory():
    assert count(kv_memory_fraction=0.5) == 1 << 13
    assert count() == 1 << 13


def test_engines_that_share_the_memory():
    """Engines on one GPU share its memory; other engines share the machine's."""
    together = {"engines_here": 4, "engines_per_gpu": 2}
    assert count(**together) == int((1 << 30) * 0.5 / 4) >> 16
    assert (
        count(**together, kv_memory_fraction=0.25) == count(**together, kv_memory_fraction=0.25, device=CUDA) == 1 << 12
    )
    assert count(**together, kv_cache_tokens=160) == 10


def test_engines_of_one_gpu_get_equal_parts_in_any_order(monkeypatch):
    """When an engine reads the free memory, the other one may have loaded its model, built its cache, or neither."""
    total, weights = 80 << 20, 16 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)
    share = int((total // 2 - weights) * 0.9) >> 16
    for taken in (weights, 2 * weights, 2 * weights + share * (1 << 16)):
        assert count(free=total - taken, engines_per_gpu=2, device=CUDA) == share
    assert count(free=5 << 20, engines_per_gpu=2, device=CUDA) == int((5 << 20) * 0.9) >> 16
    with pytest.raises(MemoryTooSmallError, match="no memory for the KV cache"):
        count(free=total, engines_per_gpu=8, device=CUDA)


def test_the_smaller_limit_counts_if_both_are_set():
    assert count(kv_cache_tokens=160, kv_memory_fraction=0.5) == 10
    assert count(kv_cache_tokens=1 << 30, kv_memory_fraction=0.5) == 1 << 13


def test_host_blocks():
    assert count_host() == 0
    assert count_host(kv_host_memory=10 << 16) == 10
    assert count_host(kv_host_memory=(11 << 16) - 1) == 10
    with pytest.raises(MemoryTooSmallError, match=r"kv_host_memory = 65535 bytes is less than the 65536 "):
        count_host(kv_host_memory=(1 << 16) - 1)
    with pytest.raises(MemoryTooSmallError, match=r"kv_host_memory = 30 MiB, but 25 MiB are left"):
        count_host(memory_free=32 << 20, num_blocks=100, kv_host_memory=30 << 20)


def test_no_more_than_the_batch_can_fill():
    assert count(max_context=100, max_batch_size=3) == 3 * 7
    assert count(max_context=100, max_batch_size=3, kv_memory_fraction=0.5) == 3 * 7


def test_kv_cache_tokens_may_exceed_the_batch():
    """Blocks beyond the batch keep cached prefixes."""
    assert count(max_context=100, max_batch_size=3, kv_cache_tokens=160 * 16) == 160
    assert count(max_context=100, max_batch_size=3, kv_cache_tokens=160 * 16, kv_memory_fraction=0.5) == 160


def test_errors_name_the_numbers():
    with pytest.raises(MemoryTooSmallError, match=r"kv_cache_tokens = 15 is less than one block of 16"):
        count(kv_cache_tokens=15)
    with pytest.raises(MemoryTooSmallError, match=r"2 MiB are free .* 50% .* block of 16 tokens takes 4\.00 MiB"):
        count(free=2 << 20, block_bytes=4 << 20)


def test_on_a_gpu():
    assert count(device=CUDA) == int((1 << 30) * 0.9) >> 16
    with pytest.raises(MemoryTooSmallError, match=r"2 MiB are free after loading and a step of the largest size, 90% "):
        count(free=2 << 20, block_bytes=4 << 20, device=CUDA)
    assert count(kv_cache_tokens=1 << 18, device=CUDA) == 1 << 14
    with pytest.raises(MemoryTooSmallError, match=r"= 262160 need 1024 MiB, but only 1023 MiB are free"):
        count(kv_cache_tokens=(1 << 18) + 16, free=(1 << 30) - 1, device=CUDA)
    assert count(kv_cache_tokens=1 << 40, kv_memory_fraction=0.5, device=CUDA) == 1 << 13


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Writes the files of a control group."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text + "\n")

    return write


def test_this_machine():
    assert free_memory(CPU) > 1 << 20


def test_without_a_container_limit_the_machines_memory_counts(container):
    container(memory_max="max", memory_current="1000")
    assert free_memory(CPU) > 1 << 20


def test_a_containers_limit_counts(container):
    container(memory_max="5000", memory_current="1000")
    assert free_memory(CPU) == 4000
    container(memory_max="5000", memory_current="6000")
    assert free_memory(CPU) == 0


LAYOUT = Layout("test", 16, (1 << 16,))


def size_with_file(folder, num_blocks: int, free: int = 1 << 30, **options) -> PoolSizes:
    """As an engine that counts `num_blocks` by the free memory."""
    config, opened = RunnerConfig(tokens_per_block=16, **options), PoolFolder(folder, "a", pytest.fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device: free)
        return size_pools(config, 1 << 16, lambda: num_blocks, CPU, partial(opened.open, LAYOUT))


def abandon(file: PoolFile | None) -> None:
    """As an engine that has filled the first 40 blocks and dies."""
    assert file is not None
    for block in range(40):
        file.reserve(block)
        file.parts[0][block] = 1
    file.close()


def test_an_adopted_file_keeps_its_size(shared_memory):
    """It occupies memory, so that the next engine counts fewer blocks."""
    abandon(size_with_file(shared_memory, 100).file)
    assert size_with_file(shared_memory, 60).num_blocks == 100


@pytest.mark.parametrize("change", [{"kv_cache_tokens": 320}, {"kv_memory_fraction": 0.2}, {"engines_here": 3}])
def test_other_settings_mean_another_size(shared_memory, change):
    abandon(size_with_file(shared_memory, 100).file)
    assert size_with_file(shared_memory, 60, **change).num_blocks == 60


def test_the_host_tier_gets_what_an_adopted_file_does_not_need(shared_memory):
    abandon(size_with_file(shared_memory, 100, kv_host_memory=1 << 21).file)
    # 512 blocks of the reserved memory are in use already, and 10 MiB are free.
    size = size_with_file(shared_memory, 60, 10 << 20, kv_host_memory=1 << 21)
    assert (size.num_blocks, size.num_host_blocks) == (100, 32)
