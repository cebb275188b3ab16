"""Stores that cannot be reached."""

import pytest

from engine_worker.parallel.channel import ChannelError
from engine_worker.parallel.group import connect_store, open_store, torchrun_store
from tests.fakes.ports import free_ports

pytestmark = pytest.mark.slow


@pytest.fixture
def port():
    """A port without a listener."""
    return free_ports(1)


def test_no_store(port):
    with pytest.raises(ChannelError, match=rf"no store at 127\.0\.0\.1:{port}: "):
        connect_store(f"127.0.0.1:{port}", 2, 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_of_torchrun_do_not_join(port, monkeypatch, rank):
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ChannelError, match=r"no store at MASTER_ADDR and MASTER_PORT: [^\n]+$"):
        torchrun_store(1.0)


def test_after_a_restart_the_keys_of_earlier_ranks_are_hidden(monkeypatch):
    """With --node-rank, torchrun keeps its store over restarts."""
    store, address = open_store(1, 20.0)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": address.partition(":")[2]}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    before = torchrun_store(20.0)
    before.set("where", "there")
    assert torchrun_store(20.0).check(["where"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    assert not torchrun_store(20.0).check(["where"])
    del store
