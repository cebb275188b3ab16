"""What `sluice serve` is told about scheduling arrives in the engine's settings."""

from pathlib import Path

import pytest

from engine_worker.config import EngineSettings, read_settings
from sluice.launch.plan import Plan, services


@pytest.fixture
def engine_settings(asked_of_ring):
    def asked(*arguments: str) -> EngineSettings:
        plan = Plan(model="model", name="name", engine_args=asked_of_ring(*arguments)["engine_args"])
        (engine,) = (service for service in services(plan, Path("folder")) if service.role == "engine")
        return read_settings(engine.command[engine.command.index("engine_worker") + 1 :])

    return asked


def test_policies(engine_settings):
    settings = engine_settings(
        "--capacity-scheduler-policy",
        "guaranteed_no_evict",
        "--context-chunking-policy",
        "equal_progress",
        "--priority-aging-seconds",
        "2.5",
        "--micro-batch-scheduler",
        "mine:Own",
        "--max-batch-size",
        "7",
    )
    assert settings.capacity_scheduler_policy == "guaranteed_no_evict"
    assert settings.context_chunking_policy == "equal_progress"
    assert settings.priority_aging_seconds == 2.5
    assert settings.micro_batch_scheduler == "mine:Own"
    assert settings.max_batch_size == 7
    assert settings.chunked_context


def test_one_scheduler_for_all(engine_settings):
    settings = engine_settings("--scheduler", "mine:Own", "--no-chunked-context")
    assert settings.schedulers.scheduler == "mine:Own"
    assert not settings.chunked_context


def test_nothing_asked(engine_settings):
    settings = engine_settings()
    assert settings.capacity_scheduler_policy == "max_utilization"
    assert settings.scheduler is settings.micro_batch_scheduler is None


def test_the_launchers_shares(engine_settings):
    settings = engine_settings()
    assert settings.step_threads >= 1
    assert (settings.kv_memory_fraction, settings.engines_here, settings.engines_per_gpu) == (None, 1, 1)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("threads", 3, (3, None)),
        ("kv_memory_fraction", 0.125, (None, 0.125)),
        ("kv_cache_tokens", 4096, (None, None)),
    ],
)
@pytest.mark.parametrize("where", ["flag", "environment", "file"])
def test_whatever_is_asked_for_beats_the_launchers_shares(
    engine_settings, monkeypatch, tmp_path, where, name, value, found
):
    flags = []
    if where == "flag":
        flags = ["--" + name.replace("_", "-"), str(value)]
    elif where == "environment":
        monkeypatch.setenv(f"SLUICE_ENGINE_{name.upper()}", str(value))
    else:
        (tmp_path / "engine.yaml").write_text(f"{name}: {value}\n")
        monkeypatch.setenv("SLUICE_ENGINE_CONFIG", str(tmp_path / "engine.yaml"))
    settings = engine_settings(*flags)
    threads, fraction = found
    assert settings.step_threads == (threads or settings.default_threads)
    assert settings.kv_memory_fraction == fraction


def test_tokens_and_a_fraction_both_bound_the_cache(engine_settings):
    settings = engine_settings("--kv-cache-tokens", "4096", "--kv-memory-fraction", "0.25")
    assert (settings.kv_cache_tokens, settings.kv_memory_fraction) == (4096, 0.25)
