"""`sluice stats`."""

import pytest
from google.protobuf.duration_pb2 import Duration
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.v1 import admin_pb2


def test_without_a_terminal_statistics_are_printed_once(sluice, script) -> None:
    script.stats.engines.add(
        engine_id="engine-0",
        iteration=1234,
        step_time=Duration(nanos=7_500_000),
        active_requests=3,
        scheduled_requests=3,
        max_batch_size=64,
        context_requests=1,
        total_context_tokens=77,
        generation_requests=2,
        used_kv_blocks=10,
        max_kv_blocks=99,
        used_host_blocks=5,
        max_host_blocks=50,
        prefix_cache_hit_ratio=0.25,
        tokens_per_second=321.4,
    )
    script.stats.detokenizers.add(detokenizer_id="detok-0", streams=8)
    result = sluice("stats")
    assert result.exit_code == 0
    for expected in ("engine-0", "1234", "7.5", "3 of 64", "1 (77 tokens)", "10 of 99", "5 of 50", "25%", "321"):
        assert expected in result.stdout
    assert "detok-0" in result.stdout


@pytest.mark.parametrize("command", ["stats", "health", "top"])
def test_tables_fit_80_columns(sluice, script, monkeypatch, command) -> None:
    monkeypatch.setattr("sluice.cli.common.FILE_WIDTH", 80)
    numbers = {"queued_requests": 1000, "used_kv_blocks": 99_999, "max_kv_blocks": 99_999, "draining": True}
    script.stats.engines.add(engine_id="engine-10", scheduled_requests=256, max_batch_size=256, **numbers)
    script.info.engines.add(engine_id="engine-10", state=admin_pb2.PEER_STATE_DRAINING)
    lines = sluice(command, *(["--once"] if command != "health" else [])).stdout.splitlines()
    assert any("engine-10" in line and "256 of 256" in line for line in lines)


def test_no_server() -> None:
    result = CliRunner().invoke(app, ["stats", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1


def test_an_engine_that_has_not_stepped(sluice, script) -> None:
    script.stats.engines.append(admin_pb2.EngineStats(engine_id="new"))
    assert "new" in sluice("stats", "--once").stdout


def test_engines_with_different_models(sluice, script) -> None:
    script.stats.engines.add(engine_id="engine-0", model_fingerprint="0123456789abcdef")
    script.stats.engines.add(engine_id="engine-1", model_fingerprint="fedcba9876543210")
    script.stats.serving_model_fingerprint = "fedcba9876543210"
    stdout = sluice("stats").stdout
    assert "The engines serve 2 different models; new requests go to engines with model fedcba98." in stdout
    (engine_line,) = (line for line in stdout.splitlines() if "engine-0" in line)
    assert "01234567" in engine_line
    script.stats.serving_model_fingerprint = ""
    assert "new requests go to all engines" in sluice("stats").stdout


def test_engines_with_one_model(sluice, script) -> None:
    script.stats.engines.add(engine_id="engine-0", model_fingerprint="0123456789abcdef")
    stdout = sluice("stats").stdout
    assert "models" not in stdout
    assert "01234567" not in stdout
