"""The keeper of a ring: its settings, its options, and its process, for which a stand-in is used."""

import os
import signal
from pathlib import Path

import pytest

from sluice import LLM
from sluice.lanes.keys import ROLES, generate
from sluice.launch import OptionsError, Plan, Ring, RingError
from sluice.launch.keeper import check_blocks
from sluice.launch.plan import Service, services
from sluice.settings.keeper import KeeperSettings
from sluice.settings.services import EngineSettings
from tests.fakes.processes import LIMIT, is_alive, wait_until

TCP = "tcp://10.0.0.7:5900"
MEMORY = Path("/dev/shm/sluice-x")


def planned(**options) -> dict[str, Service]:
    return {each.name: each for each in services(Plan("model", "name", **options), Path("/x"), kv_folder=MEMORY)}


def keeper_of(services: dict[str, Service]) -> KeeperSettings:
    settings = services["keeper"].settings({})
    assert isinstance(settings, KeeperSettings)
    return settings


def test_with_a_disk_only_the_ring_reaches_the_keeper() -> None:
    ring = planned(engines=2, kv_disk="/var/kv", drain_timeout=3, metrics_port=7000)
    keeper = keeper_of(ring)
    assert (keeper.listen, keeper.kv_folder, keeper.disk_folder) == ("ipc:///x/keeper", MEMORY, Path("/var/kv"))
    assert (keeper.id, keeper.drain_timeout, keeper.keys, keeper.metrics_port) == ("keeper", 3, None, 7005)
    assert {ring[f"engine-{i}"].settings({}).kv_keeper for i in range(2)} == {"ipc:///x/keeper"}
    assert [name for name in ring if "--kv-keeper" in ring[name].command] == ["engine-0", "engine-1"]


def test_with_an_address_it_listens_there_with_the_rings_keys() -> None:
    ring = planned(kv_keeper=TCP, keys="/keys")
    keeper = keeper_of(ring)
    assert (keeper.listen, keeper.disk_folder, keeper.keys) == (TCP, None, Path("/keys"))
    assert ring["engine-0"].settings({}).kv_keeper == TCP


def test_settings_of_the_keeper() -> None:
    shared = {"log_level": "debug", "insecure_ring": True, "max_batch_size": 3}
    keeper = keeper_of(planned(kv_disk="/var/kv", shared_args=shared, keeper_args={"disk_bytes": 1 << 30}))
    assert (keeper.log_level, keeper.insecure_ring, keeper.disk_bytes) == ("debug", True, 1 << 30)


def test_without_the_options_there_is_none() -> None:
    ring = planned(engine_args={"kv_keeper": "tcp://10.0.0.8:5900"})
    assert set(ring) == {"engine-0", "detok-0", "detok-1", "router"}
    assert ring["engine-0"].settings({}).kv_keeper == "tcp://10.0.0.8:5900"
    assert ring["router"].command == planned(kv_disk="/var/kv")["router"].command
    assert "keepers" not in Plan("model", "name").counts
    assert Plan("model", "name", kv_disk="/var/kv").counts == {
        "routers": 1,
        "engines": 1,
        "detokenizers": 2,
        "keepers": 1,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_keeper": "10.0.0.7:5900"}, "kv_keeper must be tcp://IP:PORT"),
        ({"kv_keeper": "tcp://10.0.0.7"}, "kv_keeper must be tcp://IP:PORT"),
        ({"kv_keeper": "tcp://10.0.0.7:*"}, "kv_keeper must be tcp://IP:PORT"),
        ({"kv_keeper": "tcp://*:5900"}, "kv_keeper must be tcp://IP:PORT"),
        ({"kv_keeper": "tcp://0.0.0.0:5900"}, "kv_keeper must be tcp://IP:PORT"),
        ({"kv_keeper": "tcp://node-7:5900"}, "(got 'tcp://node-7:5900')"),
        ({"kv_keeper": ""}, "(got '')"),
        ({"keeper_args": {"disk_bytes": 9}}, "keeper_args: disk_bytes has no effect without a keeper"),
        (
            {"kv_disk": "/x", "engine_args": {"kv_keeper": TCP}},
            f"kv_disk contradicts engine_args: kv_keeper is {TCP}, another keeper",
        ),
        ({"kv_disk": "/x", "shared_args": {"kv_keeper": TCP}}, "kv_disk contradicts"),
        ({"kv_disk": "/x", "metrics_port": 65532}, "ports 65532 to 65536 are needed"),
    ],
)
def test_options_that_are_refused(options, message) -> None:
    with pytest.raises(OptionsError) as caught:
        Plan("model", "name", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "has_gpus", "private", "reason"),
    [
        ({}, False, "", ""),
        ({"kv_host_memory": "8GiB"}, True, "", ""),
        ({}, True, "", "engines on GPUs need kv_host_memory, or device = cpu"),
        ({"kv_fetch": False}, False, "", "kv_fetch is off, so no engine would ask it"),
        ({}, False, "/dev/shm has 64 MiB", "the KV caches are in private memory: /dev/shm has 64 MiB"),
    ],
)
def test_engines_without_blocks_for_a_keeper(settings, has_gpus, private, reason) -> None:
    engine = EngineSettings(model="model", **settings)
    if not reason:
        check_blocks("kv_disk", engine, has_gpus, private)
        return
    with pytest.raises(OptionsError) as caught:
        check_blocks("kv_disk", engine, has_gpus, private)
    assert str(caught.value) == f"kv_disk: a keeper hands out what engines have in files in memory, but {reason}"


def test_an_address_for_other_machines_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"kv_keeper: tcp://127.0.0.1:5900 can be reached by other users"):
        Ring(kv_keeper="tcp://127.0.0.1:5900")
    with pytest.raises(OptionsError, match="kv_keeper: "):
        Ring(kv_keeper="tcp://127.0.0.1:5900", keys=str(tmp_path))
    for role in ROLES:
        generate(tmp_path, role)
    Ring(kv_keeper="tcp://127.0.0.1:5900", keys=str(tmp_path))
    Ring(kv_keeper="tcp://127.0.0.1:5900", shared_args={"insecure_ring": True})


def test_other_machines_have_no_keeper() -> None:
    with pytest.raises(OptionsError, match="kv_disk: a keeper can only be started on the machine of its engines"):
        Ring(kv_disk="/var/kv", on="ray")


def test_the_class_llm_has_the_options() -> None:
    with pytest.raises(OptionsError, match="kv_keeper must be tcp://IP:PORT"):
        LLM(kv_keeper="here")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is taken for a tmpfs with room."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr("sluice.launch.hosts.local.SHARED_MEMORY", str(folder))
    monkeypatch.setattr("sluice.launch.kv_files.no_room", lambda _: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder


@pytest.mark.process
@pytest.mark.slow
def test_it_is_restarted_like_the_others_and_ends_with_the_ring(fake, notes, tmp_path, memory) -> None:
    lines: list[tuple[str, str]] = []
    with Ring(kv_disk=tmp_path / "disk", observe=lambda line: lines.append((line.child, line.event)), **fake) as ring:
        (folder,) = memory.iterdir()
        flags = notes("keeper")["flags"]
        assert (flags["--kv-folder"], flags["--disk-folder"]) == (str(folder), str(tmp_path / "disk"))
        assert notes("engine-0")["flags"]["--kv-keeper"] == flags["--listen"]
        pid = ring.pids["keeper"]
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: ("keeper", "service_recovered") in lines, LIMIT)
        assert ("keeper", "service_exited") in lines
        ring.restart("keeper")
        assert ring.pids["keeper"] != pid
        pids = list(ring.pids.values())
    assert not any(map(is_alive, pids))
    assert not list(memory.iterdir())


@pytest.mark.process
def test_a_ring_goes_on_without_its_keeper(fake, tmp_path, memory) -> None:
    lines: list[tuple[str, bool]] = []

    def observe(line) -> None:
        if line.child == "keeper":
            lines.append((line.event, line.fields.get("given_up", False)))

    with Ring(kv_disk=tmp_path / "disk", max_failed_starts=1, observe=observe, **fake) as ring:
        (tmp_path / "keeper.do").write_text("refuse")
        os.kill(ring.pids["keeper"], signal.SIGKILL)
        assert wait_until(lambda: ("service_exited", True) in lines, LIMIT)
        assert ring.missing == []


@pytest.mark.process
def test_a_keeper_that_cannot_start_ends_the_start(fake, tmp_path, memory) -> None:
    (tmp_path / "keeper.do").write_text("refuse")
    ring = Ring(kv_disk=tmp_path / "disk", **fake)
    with pytest.raises(RingError, match="keeper cannot start: the disk is full"):
        ring.start()
    assert not list(memory.iterdir())
