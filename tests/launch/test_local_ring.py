"""The launcher with stand-in services: order, readiness and exits. No process or file is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice import Client
from sluice.checkpoint.errors import CheckpointError
from sluice.host.process import PARENT_VARIABLE
from sluice.launch import LogLine, OptionsError, Ring, RingError, local_ring
from tests.fakes.ports import free_ports
from tests.fakes.processes import is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sockets_folder(notes):
    return lambda: Path(notes("router")["flags"]["--listen"].removeprefix("ipc://")).parent


def environment_of(ring: Ring, name: str) -> list[str]:
    return Path(f"/proc/{ring.pids[name]}/environ").read_text().split("\0")


def test_starts_serves_and_ends_in_order(fake, tmp_path, sockets_folder) -> None:
    with Ring(engines=2, detokenizers=3, engine_args={"kv_cache_tokens": 512, "attention": None}, **fake) as ring:
        assert sorted(ring.pids) == ["detok-0", "detok-1", "detok-2", "engine-0", "engine-1", "router"]
        assert ring.missing == []
        with Client(ring.address) as client:
            assert client.health()
        pids = list(ring.pids.values())
        sockets = sockets_folder()
        assert sockets.is_dir()
        assert sockets.stat().st_mode & 0o077 == 0
    assert not any(map(is_alive, pids))
    assert not sockets.exists()
    ended = {name: int((tmp_path / f"{name}.ended").read_text()) for name in ring.pids}
    assert ended.pop("router") < min(ended.values())


def test_command_lines(fake, notes, nvidia_smi) -> None:
    nvidia_smi()
    with Ring(engines=2, name="mine", engine_args={"max_batch_size": 5}, router_args={"max_live": 3}, **fake):
        pass
    router, engine = notes("router"), notes("engine-1")
    assert router["module"] == "router"
    assert router["flags"]["--engines"].split(",") == [notes(f"engine-{i}")["flags"]["--listen"] for i in range(2)]
    assert router["flags"]["--detokenizers"].split(",") == [notes(f"detok-{i}")["flags"]["--listen"] for i in range(2)]
    assert router["flags"]["--max-live"] == "3"
    assert engine["flags"]["--name"] == "mine"
    assert engine["flags"]["--max-batch-size"] == "5"
    assert int(engine["flags"]["--default-threads"]) >= 1
    assert engine["flags"]["--engines-here"] == engine["flags"]["--engines-per-gpu"] == "2"
    assert all(len(notes(name)["flags"]["--listen"]) < 107 for name in ("router", "engine-0", "detok-1"))


def test_every_process_has_its_own_port_for_metrics(fake, notes) -> None:
    first = free_ports(5)
    with Ring(engines=2, metrics_port=first, **fake) as ring:
        assert ring.status_pages == [f"http://127.0.0.1:{first}/"]
    names = ("router", "engine-0", "engine-1", "detok-0", "detok-1")
    ports = [notes(name)["flags"]["--metrics-port"] for name in names]
    assert ports == [str(first + i) for i in range(5)]


def test_the_status_pages_of_all_routers(fake) -> None:
    first = free_ports(6)
    args = {"metrics_host": "::"}
    pages = [f"http://[::1]:{first + i}/" for i in range(2)]
    assert Ring(routers=2, metrics_port=first, router_args=args, **fake).status_pages == pages
    assert Ring(**fake).status_pages == []


def test_sockets_are_short_with_a_long_temporary_folder(fake, tmp_path, monkeypatch, notes) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Ring(**fake):
        assert len(notes("router")["flags"]["--listen"]) < 107
    assert list(deep.iterdir()) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["router", "engine-0", "detok-1"])
def test_an_exit_during_the_start_shows_the_last_lines_and_leaves_no_process(fake, tmp_path, name) -> None:
    (tmp_path / f"{name}.do").write_text("die")
    ring = Ring(**fake)
    with pytest.raises(RingError, match=f"{name} ended with code 3") as caught:
        ring.start()
    assert caught.value.tail == ("Traceback: it broke",)
    assert not any(map(is_alive, ring.pids.values()))


def test_start_timeout(fake, tmp_path) -> None:
    (tmp_path / "router.do").write_text("hang")
    ring = Ring(**{**fake, "start_timeout": 0.5})
    with pytest.raises(RingError, match=r"router did not serve within start_timeout, 0.5 s"):
        ring.start()
    assert not any(map(is_alive, ring.pids.values()))


def test_an_exception_in_the_with_block_leaves_no_process(fake) -> None:
    def work() -> None:
        with Ring(**fake) as ring:
            pids.extend(ring.pids.values())
            raise KeyError("x")

    pids: list[int] = []
    with pytest.raises(KeyError):
        work()
    assert pids
    assert not any(map(is_alive, pids))


def test_a_child_that_ignores_the_signal_is_killed(fake, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sluice.launch.local_ring.KILL_AFTER_SECONDS", 0.3)
    (tmp_path / "engine-0.do").write_text("deaf")
    with Ring(drain_timeout=0, **fake) as ring:
        pass
    assert ring.children["engine-0"].ending == "was killed by SIGKILL"
    assert not any(map(is_alive, ring.pids.values()))


def test_log_lines_are_observed(fake) -> None:
    lines: list[LogLine] = []
    with Ring(observe=lines.append, **fake):
        pass
    expected = {"engine-0": ["loading", "loading", "loading", "ready"]}
    expected["router"] = ["ready", "something odd", "detail", "request_ended"]
    for name, events in expected.items():
        assert wait_until(
            lambda: (
                [line.event for line in lines if line.child == name] == events  # noqa: B023
            )
        )
    loading = [line.fields["done"] for line in lines if line.child == "engine-0" and line.event == "loading"]
    assert loading == [0, 50, 100]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("error", "printed"), [(BrokenPipeError, False), (KeyError, True)])
def test_an_observer_that_fails_does_not_end_the_ring(fake, capfd, error, printed) -> None:
    def broken(line: LogLine) -> None:
        raise error

    with Ring(observe=broken, **fake) as ring:
        pid = ring.pids["engine-0"]
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: ring.pids["engine-0"] != pid)
        assert ring.missing == []
    assert ("KeyError" in capfd.readouterr().err) is printed


def test_children_die_with_a_killed_launcher(fake, notes, sockets_folder) -> None:
    code = (
        "import sys, time; from sluice.launch import Ring\n"
        f"with Ring(python={fake['python']!r}) as ring: print('up', flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    with launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"up\n"
            pids = [notes(name)["pid"] for name in ("router", "engine-0", "detok-0", "detok-1")]
            assert all(map(is_alive, pids))
            folder = sockets_folder()
            assert folder.is_dir()
        finally:
            # Once its children have exited, the ring of any other test may remove the folder.
            launcher.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)))
    with Ring(**fake):
        assert not folder.exists()


def test_a_gateway_needs_this_machine_and_its_packages(monkeypatch):
    with pytest.raises(OptionsError, match="http_port: a gateway can only be started on this machine"):
        Ring(port=9100, http_port=8000, on="ray")
    monkeypatch.setattr(local_ring, "find_spec", lambda _: None)
    with pytest.raises(OptionsError, match=r"sluice-serve\[gateway\]"):
        Ring(port=9100, http_port=8000)


def test_an_invalid_model_and_invalid_options_are_refused(fake) -> None:
    with pytest.raises(CheckpointError, match="no/such/folder"):
        Ring("no/such/folder")
    with pytest.raises(OptionsError, match=r"engines must be at least 1 \(got 0\)"):
        Ring(engines=0)
    with pytest.raises(OptionsError, match="port and metrics_port: port 9101 is in both ranges"):
        Ring(port=9100, metrics_port=9101, routers=2)
    with pytest.raises(OptionsError, match="ports 65534 to 65537 are needed, but the highest port is 65535"):
        Ring(metrics_port=65534)
    with pytest.raises(OptionsError, match="router: unknown arguments: --max-queue 3"):
        Ring(router_args={"max_queue": 3})
    with pytest.raises(OptionsError, match="engine_worker: max_batch_size: must be less than or equal to 4096"):
        Ring(engine_args={"max_batch_size": 5000})
    with pytest.raises(TypeError, match="wings"):
        Ring(wings=2)


def test_environment_of_the_children(fake, monkeypatch) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with Ring(**fake) as ring:
        environment = environment_of(ring, "router")
    assert f"{PARENT_VARIABLE}={os.getpid()}" in environment
    assert "OMP_WAIT_POLICY=PASSIVE" in environment
    assert not [variable for variable in environment if variable.startswith(("RANK=", "WORLD_SIZE="))]


def test_each_engine_keeps_its_gpus_after_a_restart(fake, nvidia_smi) -> None:
    nvidia_smi(0, 1, 2, 3)
    lines: list[LogLine] = []
    with Ring(engines=2, engine_args={"tensor_parallel": 2}, observe=lines.append, **fake) as ring:
        assert "CUDA_VISIBLE_DEVICES=0,1" in environment_of(ring, "engine-0")
        assert "CUDA_VISIBLE_DEVICES=2,3" in environment_of(ring, "engine-1")
        assert not [each for each in environment_of(ring, "router") if each.startswith("CUDA_")]
        ring.restart("engine-1")
        assert "CUDA_VISIBLE_DEVICES=2,3" in environment_of(ring, "engine-1")
    assigned = {line.child: (line.fields["gpus"], line.is_problem) for line in lines if line.event == "gpus_assigned"}
    assert assigned == {"engine-0": ("0,1", False), "engine-1": ("2,3", False)}


def test_shared_gpus_are_logged_as_warnings(fake, nvidia_smi, notes) -> None:
    nvidia_smi(0, 1)
    lines: list[LogLine] = []
    with Ring(engines=3, observe=lines.append, **fake):
        pass
    assigned = {line.child: (line.fields["gpus"], line.is_problem) for line in lines if line.event == "gpus_assigned"}
    assert assigned == {"engine-0": ("0", True), "engine-1": ("1", False), "engine-2": ("0", True)}
    flags = [notes(f"engine-{i}")["flags"] for i in range(3)]
    assert [(each["--engines-here"], each["--engines-per-gpu"]) for each in flags] == [
        ("3", "2"),
        ("3", "1"),
        ("3", "2"),
    ]


def test_too_few_gpus_start_nothing(fake, nvidia_smi) -> None:
    nvidia_smi(0, 1, 2)
    ring = Ring(engines=2, engine_args={"tensor_parallel": 2}, **fake)
    with pytest.raises(OptionsError, match="need 4 GPUs, but 3 are visible: 0,1,2"):
        ring.start()
    assert ring.pids == {}
