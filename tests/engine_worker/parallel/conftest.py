import pytest

from engine_worker.attention.choice import ChosenBackend
from engine_worker.parallel import follower, leader
from engine_worker.runner import load
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.parallel.fake_group import FakeGroup, FakeProcesses
from tests.fakes.graphs import WeakCapture
from tests.fakes.paged_attention import PagedTorch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return str(folder)


@pytest.fixture
def group(monkeypatch) -> FakeGroup:
    """The group of the rank that loads, with fake graphs."""
    group = FakeGroup(WeakCapture())
    monkeypatch.setattr(load, "graphs_refused", lambda *_: None)
    monkeypatch.setattr(load, "CudaCapture", lambda _: group.capture)
    monkeypatch.setattr(
        load, "choose", lambda _, site: ChosenBackend(PagedTorch(site.heads), "it is fake", site.tokens_per_block)
    )
    monkeypatch.setattr(leader, "Processes", FakeProcesses)
    monkeypatch.setattr(leader, "open_store", lambda *_: (None, "there:1"))
    monkeypatch.setattr(follower, "connect_store", lambda *_: object())
    for module in (leader, follower):
        monkeypatch.setattr(module, "RankGroup", lambda *_: group)
    return group
