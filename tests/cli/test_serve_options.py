"""What `sluice serve` is told about scheduling arrives in the engine's settings, and in the router's."""

import inspect
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

import detok_service.config
import engine_worker.config
import router.config
from engine_worker.config import EngineSettings
from sluice import tiny_model
from sluice.cli import app
from sluice.cli.serve import serve
from sluice.launch.plan import Plan, services
from sluice.ring.settings import ServiceSettings

READ = {
    "engine": engine_worker.config.read_settings,
    "router": router.config.read_settings,
    "detok": detok_service.config.read_settings,
}


@pytest.fixture
def settings_by_role(asked_of_ring):
    def asked(*arguments: str) -> Mapping[str, ServiceSettings]:
        options = asked_of_ring(*arguments)
        given = {name: value for name, value in options.items() if name in Plan.__dataclass_fields__}
        planned = services(Plan(**{"model": "model", **given, "name": given["name"] or "name"}), Path("folder"))
        return {each.role: READ[each.role](each.command[each.command.index(each.module) + 1 :]) for each in planned}

    return asked


@pytest.fixture
def engine_settings(settings_by_role):
    def asked(*arguments: str) -> EngineSettings:
        return settings_by_role(*arguments)["engine"]

    return asked


OWN = {"model", "revision", "config", "metrics_port"}
"""Each service has its own port; config names a file, and services get the folder that the launcher has found for model
and revision."""


def test_a_setting_that_services_share_reaches_them_all(settings_by_role):
    counts = Counter(name for settings in settings_by_role().values() for name in type(settings).model_fields)
    flags = inspect.signature(serve).parameters.keys() - OWN
    shared = [name for name in flags if counts[name] > 1]
    assert {"drain_timeout", "priority_aging_seconds"} <= set(shared)
    found = settings_by_role(*(part for name in shared for part in (f"--{name.replace('_', '-')}", "7")))
    for settings in found.values():
        for name in set(shared) & type(settings).model_fields.keys():
            assert str(getattr(settings, name)) in ("7", "7.0"), (settings, name)


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
def test_whatever_is_asked_for_heartbeats_the_launchers_shares(
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


def test_a_revision(asked_of_ring):
    assert asked_of_ring("someone/model", "--revision", "v2")["revision"] == "v2"
    assert asked_of_ring("someone/model")["revision"] is None


def test_a_revision_of_a_folder_is_refused():
    result = CliRunner().invoke(app, ["serve", str(tiny_model.path()), "--revision", "v2"])
    assert result.exit_code == 1
    assert "revision 'v2' is for models of the hub" in result.stderr
