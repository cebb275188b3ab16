"""A program that started a ring leaves no process and no socket behind, in every way in which it can end."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.executor import GenerationExecutor, SamplingParams
from sluice.launch import RingError
from tests.fakes.processes import is_alive, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 200.0
"""Timeout, in seconds, of a program that starts a ring on a loaded machine."""

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "tests" / "fakes" / "services.py"
NAMES = ("router", "engine-0", "detok-0", "detok-1")

START = """
    import os, sys, threading, time
    from sluice.executor import GenerationExecutor

    def create(**options):
        return GenerationExecutor.create(python=(sys.executable, *sys.argv[1:]), start_timeout=120, **options)

    def print_ready_with_256_requests(executor):
        def wait():
            while len(executor._ready._open) < 256:
                time.sleep(0.01)
            print("ready", flush=True)
        threading.Thread(target=wait, daemon=True).start()

    prompts = [f"p{i}" for i in range(500)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder in which the fake services write what they received, and read what to do."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.fixture
def program(folder) -> Iterator:
    """Returns a function that starts Python code in a separate process group, as a shell does."""
    started: list[subprocess.Popen] = []

    def start(code: str) -> subprocess.Popen:
        source = textwrap.dedent(START) + textwrap.dedent(code)
        command = [sys.executable, "-c", source, str(SERVICES), str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, process_group=0, **pipes))
        return started[-1]

    yield start
    for process in started:
        # The whole group, because a fork of the program keeps the pipes open.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_notes(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def assert_no_leftovers(folder: Path, process: subprocess.Popen) -> None:
    assert not any(is_alive(read_notes(folder, name)["pid"]) for name in NAMES)
    assert not Path(read_notes(folder, "router")["flags"]["--listen"].removeprefix("ipc://")).parent.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


WAYS_TO_END = {
    "requests under way": (
        "with create() as executor: results = [executor.generate_async(p) for p in prompts]\n"
        "print(sum(each.result().outputs[0].text == 'Hello, world' for each in results))",
        0,
        "500\n",
    ),
    "shutdown": ("with create() as executor: print(len(executor.generate(prompts)))", 0, "500\n"),
    "no shutdown": ("executor = create(); print(len(executor.generate(prompts)))", 0, "500\n"),
    "failed request": ("with create() as executor: executor.generate([*prompts, b'x'])", 1, ""),
    "exception without shutdown": ("executor = create(); executor.generate(prompts); 1 / 0", 1, ""),
    "sys.exit with requests under way": ("e = create(); e.generate_async('x', streaming=True); sys.exit(3)", 3, ""),
}


FAST = ("requests under way", "exception without shutdown")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "how", [how if how in FAST else pytest.param(how, marks=pytest.mark.long) for how in WAYS_TO_END]
)
def test_every_way_to_end(program, folder, how) -> None:
    code, status, out = WAYS_TO_END[how]
    process = program(code)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert (process.returncode, stdout) == (status, out), stderr
    assert_no_leftovers(folder, process)
    assert all((folder / f"{name}.ended").exists() for name in NAMES)


def test_requests_end_before_the_ring_drains(program, folder) -> None:
    """Even if a library's finalizer was registered before ours, so that all finalizers run after the ring has ended."""
    (folder / "router.do").write_text("silent")
    process = program(
        """
        import weakref
        from sluice.executor.local import LocalRing

        def print_state_and_close(ring):
            print("open" if executor.can_enqueue_requests() else "closed")
            close(ring)

        weakref.finalize(print_state_and_close, int)
        close, LocalRing.close = LocalRing.close, print_state_and_close
        executor = create()
        executor.generate_async("x")
        """
    )
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert (process.returncode, stdout.split()[:1]) == (0, ["closed"]), stderr
    assert_no_leftovers(folder, process)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "code",
    [
        "with create() as e: print_ready_with_256_requests(e); e.generate(prompts)",
        pytest.param("e = create(); print_ready_with_256_requests(e); e.generate(prompts)", marks=pytest.mark.long),
        "e = create(); print_ready_with_256_requests(e); [e.generate_async(p) for p in prompts]; e.await_responses()",
    ],
)
def test_ctrl_c_while_requests_run(program, folder, code) -> None:
    (folder / "router.do").write_text("silent")
    process = program(code)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in stderr.splitlines(), stderr
    assert "Exception in" not in stderr
    assert_no_leftovers(folder, process)


@pytest.mark.long
def test_ctrl_c_while_shutdown_waits(program, folder) -> None:
    (folder / "router.do").write_text("silent")
    process = program(
        """
        def print_ready_when_finishing(executor):
            while executor.can_enqueue_requests():
                time.sleep(0.01)
            print("ready", flush=True)

        with create() as executor:
            result = executor.generate_async("x")
            threading.Thread(target=print_ready_when_finishing, args=[executor], daemon=True).start()
        """
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in stderr.splitlines(), stderr
    assert_no_leftovers(folder, process)


def test_ctrl_c_while_starting(program, folder) -> None:
    (folder / "router.do").write_text("hang")
    process = program("create()")
    assert wait_until(lambda: all((folder / f"{name}.json").exists() for name in NAMES))
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in stderr.splitlines(), stderr
    assert "Exception in" not in stderr
    assert_no_leftovers(folder, process)


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_drain(program, folder) -> None:
    for name in NAMES:
        (folder / f"{name}.do").write_text("deaf")
    process = program("with create(drain_timeout=100): print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert wait_until((folder / "router.signalled").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT)
    assert "KeyboardInterrupt" in stderr.splitlines(), stderr
    assert_no_leftovers(folder, process)


def test_killing_the_program_ends_its_processes(program, folder) -> None:
    process = program("e = create(); print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert wait_until(lambda: not any(is_alive(read_notes(folder, name)["pid"]) for name in NAMES))


@pytest.mark.quick(1)
@pytest.mark.parametrize("leaves", ["sys.exit()", "pass"])
def test_a_fork_does_not_stop_the_ring(program, folder, leaves, monkeypatch) -> None:
    # gRPC's fork handlers may wait forever in a fork of a process with running calls.
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "false")
    process = program(
        f"""
        with create() as executor:
            if os.fork() == 0:
                {leaves}
            else:
                os.wait()
                print(executor.generate("x").outputs[0].text)
        """
    )
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert stdout == "Hello, world\n", stderr
    assert_no_leftovers(folder, process)


def test_the_ring_outlives_the_thread_that_created_it(folder) -> None:
    executors: list[GenerationExecutor] = []
    python = (sys.executable, str(SERVICES), str(folder))
    thread = threading.Thread(target=lambda: executors.append(GenerationExecutor.create(python=python)))
    thread.start()
    thread.join()
    with executors[0] as executor:
        assert sorted(executor.pids) == sorted(NAMES)
        assert executor.generate("x", SamplingParams()).outputs[0].text == "Hello, world"
        assert all(map(is_alive, executor.pids.values()))
    assert not any(map(is_alive, executor.pids.values()))


def test_a_ring_that_cannot_start(folder, caplog) -> None:
    (folder / "engine-0.do").write_text("die")
    with pytest.raises(RingError, match="engine-0 ended with code 3"):
        GenerationExecutor.create(python=(sys.executable, str(SERVICES), str(folder)))
    assert "engine-0: Traceback: it broke" in caplog.messages
    assert not any(is_alive(read_notes(folder, name)["pid"]) for name in NAMES if (folder / f"{name}.json").exists())


def test_settings_reach_the_services(folder) -> None:
    from sluice.executor import KvCacheConfig, SchedulerConfig

    with GenerationExecutor.create(
        engines=2,
        num_postprocess_workers=1,
        max_batch_size=4,
        max_num_tokens=128,
        kv_cache_config=KvCacheConfig(max_tokens=256, max_attention_window=[32, 64]),
        scheduler_config=SchedulerConfig(capacity_scheduler_policy="mine:Policy"),
        engine_args={"threads": 1},
        python=(sys.executable, str(SERVICES), str(folder)),
        name="mine",
    ) as executor:
        assert sorted(executor.pids) == ["detok-0", "engine-0", "engine-1", "router"]
    flags = read_notes(folder, "engine-1")["flags"]
    expected = {
        "--max-batch-size": "4",
        "--max-tokens-per-step": "128",
        "--kv-cache-tokens": "256",
        "--max-attention-window": "32,64",
        "--capacity-scheduler-policy": "mine:Policy",
        "--threads": "1",
        "--name": "mine",
    }
    assert flags.items() >= expected.items()
    with pytest.raises(ValueError, match="detokenizers must be at least 1"):
        GenerationExecutor.create(num_postprocess_workers=0)
