"""The engine's process: a model, the ring, signals."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

import sluice.tiny_model
from engine_worker.__main__ import find_pool_folder, progress_of
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings
from sluice.telemetry.probes import Startup
from sluice.wire.errors import FinishReason
from sluice.wire.heartbeats import EngineHeartbeat, Hello, KeepAlive
from sluice.wire.rows import TokenBatch, TokenRow
from tests.fakes.clock import Clock
from tests.fakes.engine import spec_of
from tests.fakes.lanes import connected
from tests.fakes.ports import free_ports
from tests.fakes.processes import wait_until
from tests.fakes.rows import rows_of

pytestmark = pytest.mark.process

MODEL = Path(sluice.tiny_model.__file__).parent / "checkpoint"


def start(*flags: str, working: Path | None = None) -> subprocess.Popen[str]:
    """`working`: its working directory."""
    command = [sys.executable, "-m", "engine_worker", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=working)


def events(process: subprocess.Popen[str], until: str) -> list[dict]:
    logged = []
    for line in process.stderr:
        logged.append(json.loads(line))
        if logged[-1]["event"] == until:
            return logged
    raise AssertionError(logged)


@contextmanager
def submitted(ready: dict, folder: Path, prompt: list[int]) -> Iterator[Callable[[], list[TokenRow]]]:
    """Send a request for two outputs to an engine. Yields a function that waits until both have ended."""
    with zmq.Context() as context:
        router = Inbox(context, f"ipc://{folder}/router", EngineHeartbeat)
        detokenizer = Inbox(context, f"ipc://{folder}/detokenizer", TokenBatch | KeepAlive)
        lane = connected(Lane(context, ready["address"]))
        lane.send(Hello("r0", router.address))
        assert router.wait(60)
        (heartbeat, *_) = router.receive()
        spec = spec_of(prompt, 5, n=2, epoch=heartbeat.epoch, detokenizer=detokenizer.address)
        assert lane.send(msgspec.structs.replace(spec, router=router.address))

        def rows() -> list[TokenRow]:
            found: list[TokenRow] = []
            while sum(row.end is not None for row in found) < 2:
                assert detokenizer.wait(60)
                batches = (batch for batch in detokenizer.receive() if isinstance(batch, TokenBatch))
                found += [row for batch in batches for row in rows_of(batch)]
            return found

        try:
            yield rows
        finally:
            for socket in (lane, router, detokenizer):
                socket.close()


def test_an_engine_serves_the_bundled_model_and_drains(tmp_path):
    flags = ["--id", "e0", "--listen", f"ipc://{tmp_path}/engine", "--threads", "1", "--kv-cache-tokens", "4096"]
    process = start("--model", str(MODEL), *flags)
    try:
        *loading, ready = events(process, "ready")
        assert {entry["event"] for entry in loading} == {"loading"}
        assert loading[-1]["done"] == loading[-1]["total"] > 0
        expected = {"id": "e0", "device": "cpu", "dtype": "float32", "attention": "openvino", "kv_tokens": 4096}
        assert expected.items() <= ready.items()
        assert {"threads": 1, "kv_cache_tokens": 4096}.items() <= ready["settings"].items()
        with submitted(ready, tmp_path, [1, 2, 3]) as rows:
            process.send_signal(signal.SIGTERM)
            ended = [row.end for row in rows() if row.end]
        ends, codes = {end.reason for end in ended}, {end.fault.code for end in ended if end.fault}
        # The signal may arrive before the request.
        assert ends == {FinishReason.LENGTH} or (ends == {FinishReason.ERROR} and codes == {"DRAINING"})
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("small_memory", ["8m"], indirect=True)
def test_an_engine_serves_if_its_folder_in_memory_is_too_small(small_memory, tmp_path):
    flags = ["--listen", f"ipc://{tmp_path}/engine", "--threads", "1", "--kv-cache-tokens", "4096"]
    process = start("--model", str(MODEL), *flags, "--kv-folder", str(small_memory))
    try:
        *_, ready = events(process, "ready")
        assert ready["kv_file"].startswith(str(small_memory))
        # 10 MB of keys and values.
        with submitted(ready, tmp_path, [token % 90 + 3 for token in range(1700)]) as rows:
            assert {row.end.reason for row in rows() if row.end} == {FinishReason.LENGTH}
        process.send_signal(signal.SIGTERM)
        *_, warning = events(process, "kv_file_limited")
        assert warning["level"] == "warning"
        assert warning["reason"].endswith("MiB are left: 0 of 128 blocks are in the file")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


WAITING = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
def unused(*_): ...
"""


@pytest.mark.long
def test_the_metrics_port_answers_while_an_engine_loads_and_a_small_cache_is_a_warning(tmp_path):
    # Loading blocks until the test has checked the answers during loading.
    (tmp_path / "waiting.py").write_text(WAITING)
    port = free_ports(1)
    process = start(
        *("--model", str(MODEL), "--listen", f"ipc://{tmp_path}/engine", "--threads", "1"),
        *("--metrics-port", str(port), "--logits-processors", '{"unused": "waiting:unused"}'),
        *("--kv-cache-tokens", "1024"),
        working=tmp_path,
    )
    try:
        assert wait_until(lambda: get(port, "/livez") == (200, "ok\n"))
        status, reason = get(port, "/readyz")
        assert status == 503
        assert reason.startswith(("starting", "loading"))
        assert "sluice_engine_loading_ratio " in get(port, "/metrics")[1]
        (tmp_path / "go").touch()
        (warning,) = (entry for entry in events(process, "ready") if entry["level"] == "warning")
        assert warning["event"] == "context_limited"
        assert "1024 tokens, fewer than the context of 2048" in warning["reason"]
        assert "raise kv_cache_tokens" in warning["reason"]
        assert wait_until(lambda: get(port, "/readyz") == (200, "ok\n"))
        assert "sluice_engine_loading_ratio 1.0" in get(port, "/metrics")[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "neither a folder on this machine nor a Hugging Face id"),
        pytest.param(
            ["--model", str(MODEL), "--listen", "tcp://nonsense"],
            "cannot listen on tcp://nonsense",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--model", str(MODEL), "--kv-cache-tokens", "20"],
            "less than one block of 32 tokens",
            marks=pytest.mark.long,
        ),
        (["--model", str(MODEL), "--kv-host-memory", "lots"], "kv_host_memory: could not parse"),
        (["--model", str(MODEL), "--kv-host-memory", "1KiB"], "that a block of 32 tokens takes"),
        (["--model", str(MODEL), "--max-batch-size", "600"], "must be at least max_batch_size, 600"),
        (["--model", str(MODEL), "--device", "cpu", "--dtype", "float16"], "dtype = float16 is slower than float32"),
        (["--model", str(MODEL), "--no-such-flag", "1"], "no-such-flag"),
        (
            ["--model", str(MODEL), "--draft-model", "/nowhere"],
            "neither a folder on this machine nor a Hugging Face id",
        ),
        (
            ["--model", str(MODEL), "--draft-model", str(MODEL), "--tensor-parallel", "2"],
            "draft_model: is not supported with tensor_parallel",
        ),
    ],
)
def test_invalid_settings_are_one_line(flags, message):
    process = start(*flags, "--insecure-ring")
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert message in errors
    assert "Traceback" not in errors


def test_an_address_in_use_is_one_line(tmp_path):
    with zmq.Context() as context:
        inbox = Inbox(context, f"ipc://{tmp_path}/engine", Hello)
        process = start("--model", str(MODEL), "--threads", "1", "--listen", inbox.address)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1
        last = json.loads(errors.splitlines()[-1])
        assert last["error"] == f"cannot listen on {inbox.address}: process {os.getpid()} listens there"
        assert "Traceback" not in errors
        inbox.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "create keys"), (["--keys", "/no/such/folder"], "cannot read /no/such/folder/secret/engine.key")],
)
def test_a_port_is_not_opened_without_keys(flags, message):
    process = start("--model", str(MODEL), *flags)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert message in errors
    assert "Traceback" not in errors


def test_settings_by_flag_environment_and_default(monkeypatch):
    monkeypatch.setenv("SLUICE_ENGINE_MAX_BATCH_SIZE", "32")
    monkeypatch.setenv("SLUICE_ENGINE_DTYPE", "bfloat16")
    settings = load_settings(EngineSettings, ["--model", "m", "--dtype", "float32", "--no-chunked-context"])
    assert (settings.max_batch_size, settings.dtype, settings.chunked_context) == (32, "float32", False)
    assert settings.block_reuse is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output-layers", "1,2,1"], "output_layers: must not name a layer twice"),
        (["--output-layers", "-1"], "output_layers"),
        (["--output-tensors", '{"layers.1": "module:function"}'], "'layers.1' is not a valid name of a tensor"),
        (["--output-tensors", '{"logits": "module:function"}'], "'logits' is not a valid name of a tensor"),
        (["--debug-tensors", "logits,k"], r"debug_tensors: must be among input_ids, .*, logits \(got 'k'\)"),
        (["--debug-tensors", "logits"], r"debug_tensors: needs debug_folder \(got logits\)"),
    ],
)
def test_names_of_tensors(flags, message):
    with pytest.raises(SystemExit, match=message):
        load_settings(EngineSettings, ["--model", "m", *flags])


def test_attention_windows_are_one_number_or_several(monkeypatch, tmp_path):
    def windows(*flags: str) -> tuple[int, ...]:
        return load_settings(EngineSettings, ["--model", "m", *flags]).max_attention_window

    assert windows() == ()
    assert windows("--max-attention-window", "64") == (64,)
    assert windows("--max-attention-window", "64,128") == (64, 128)
    file = tmp_path / "settings.yaml"
    for text in ("64", "[64]"):
        file.write_text(f"max_attention_window: {text}")
        assert windows("--config", str(file)) == (64,)
    monkeypatch.setenv("SLUICE_ENGINE_MAX_ATTENTION_WINDOW", "5,6")
    assert windows() == (5, 6)
    with pytest.raises(SystemExit, match="max_attention_window"):
        windows("--max-attention-window", "64,0")


def test_progress_is_logged_periodically_and_at_the_end():
    logged, clock = [], Clock()

    class Log:
        def info(self, event, **fields):
            logged.append((event, fields["done"], fields["total"]))

    progress = progress_of("loading", Startup(), Log(), clock)
    for done in range(1, 101):
        clock.now += 0.01
        progress(done, 100)
    assert logged[0] == ("loading", 1, 100)
    assert logged[-1] == ("loading", 100, 100)
    assert 8 <= len(logged) <= 13


def test_ranks_that_share_a_block_do_not_use_the_launchers_folder(tmp_path):
    settings = EngineSettings(model="m", tensor_parallel=2, default_kv_folder=str(tmp_path / "files"))
    assert find_pool_folder(settings, lambda event, reason: pytest.fail(reason)) is None
    assert not (tmp_path / "files").exists()
