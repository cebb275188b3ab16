"""Forks of a process with an executor: calls raise instead of waiting forever, and the parent is unaffected.

The tests only change the process id, since gRPC may crash in a real fork.
"""

import os
from pathlib import Path

import pytest

from sluice.executor import GenerationExecutor
from sluice.executor.forks import remove_with


@pytest.fixture
def fork(monkeypatch):
    """Returns a function after which this process looks like a fork of itself, and one that ends this."""
    pid = os.getpid()
    return lambda: monkeypatch.setattr(os, "getpid", lambda: pid + 1), lambda: monkeypatch.setattr(
        os, "getpid", lambda: pid
    )


async def test_calls_in_a_fork_raise_with_the_remedy(executor, address, script, fork) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    enter, leave = fork
    enter()
    calls = [
        lambda: executor.generate("x"),
        lambda: executor.tokenize("x"),
        result.result,
        result.abort,
        executor.await_responses,
        lambda: executor.get_latest_stats(None),
        lambda: executor.get_kv_cache_events(None),
        lambda: GenerationExecutor.connect(address),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"in a fork .* multiprocessing\.get_context\(\"spawn\"\)"):
            call()
    with pytest.raises(RuntimeError, match="in a fork"):
        await result
    leave()
    script.hangs = False
    assert (await executor.generate_async("x")).outputs[0].text == "Hello, world"


def test_a_fork_removes_no_folder_of_its_parent(tmp_path: Path, fork) -> None:
    enter, leave = fork
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    remove_first, remove_second = remove_with(pytest, first), remove_with(pytest, second)
    enter()
    remove_first()
    leave()
    remove_second()
    assert [folder.exists() for folder in (first, second)] == [True, False]
