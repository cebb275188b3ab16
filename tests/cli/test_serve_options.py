"""Options of `sluice serve` become settings of the services."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice import tiny_model
from sluice.cli.commands import app
from sluice.launch.plan import Plan, services
from sluice.settings.read import assignable, load_settings
from sluice.settings.services import PROCESSES, EngineSettings, ServiceSettings


@pytest.fixture
def settings_by_role(ring_options):
    """Returns the settings of each service for arguments of `sluice serve`."""

    def read(*arguments: str) -> Mapping[str, ServiceSettings]:
        options = {name: value for name, value in ring_options(*arguments).items() if name in Plan.__dataclass_fields__}
        planned = services(
            Plan(**{"model": "model", **options, "name": options["name"] or "name"}),
            Path("folder"),
            kv_folder=Path("kv"),
        )
        return {
            service.role: load_settings(service.kind, service.command[service.command.index(service.kind.module) + 1 :])
            for service in planned
        }

    return read


@pytest.fixture
def engine_settings(settings_by_role):
    """Returns the settings of the engine for arguments of `sluice serve`."""

    def read(*arguments: str) -> EngineSettings:
        return settings_by_role(*arguments)["engine"]

    return read


@pytest.fixture
def refused():
    """Returns the error, in one line, for invalid arguments."""

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    return call


VALUES = {"log_level": "debug", "insecure_ring": "true", "insecure": "true", "metrics_host": "::1"}
EVERY_SERVICE = ("--http-port", "8000", "--set", "gateway.router_ca=7", "--kv-disk", "disk")


def test_a_shared_setting_reaches_every_service_that_has_it(settings_by_role):
    shared = [key for key in assignable() if "." not in key and key not in ("config", "metrics_port")]
    assert {"drain_timeout", "priority_aging_seconds", "log_level"} <= set(shared)
    arguments = (part for key in shared for part in ("--set", f"{key}={VALUES.get(key, '7')}"))
    settings_of_services = settings_by_role(*EVERY_SERVICE, *arguments).values()
    for key in shared:
        values = [getattr(settings, key) for settings in settings_of_services if hasattr(settings, key)]
        assert len(values) > 1
        assert len(set(values)) == 1
        assert values[0] in (7, "7", True, "debug", "::1"), key


def test_any_setting_of_any_service(settings_by_role):
    texts = ("engine.scheduler=mine:Own", "engine.chunked_context=no", "engine.max_attention_window=64,128")
    texts += ("engine.kv_host_memory=8GiB", 'router.tenant_weights={"search": 2}', "detokenizer.max_streams=5")
    settings = settings_by_role(*(part for text in texts for part in ("--set", text)))
    engine, router, detokenizer = settings["engine"], settings["router"], settings["detok"]
    assert (engine.scheduler, engine.chunked_context, engine.max_attention_window) == ("mine:Own", False, (64, 128))
    assert engine.kv_host_memory == 8 << 30
    assert router.tenant_weights == {"search": 2.0}
    assert detokenizer.max_streams == 5


def test_a_setting_of_one_service_needs_no_service(settings_by_role):
    texts = ("lora=true", "max_live=7", "max_streams=5", "tool_parser=hermes")
    arguments = (part for text in texts for part in ("--set", text))
    settings = settings_by_role("--http-port", "8000", "--max-batch-size", "8", *arguments, "--set", "max_batch_size=3")
    assert settings["engine"].lora
    assert settings["engine"].max_batch_size == 3, "--set overrides the option, as it does with the service's name"
    assert settings["router"].max_live == 7
    assert settings["detok"].max_streams == 5
    assert settings["gateway"].tool_parser == "hermes"


def test_the_last_value_and_the_value_of_a_service_take_precedence(settings_by_role):
    settings = settings_by_role(
        *("--set", "engine.max_batch_size=7", "--max-batch-size", "8", "--set", "engine.max_batch_size=9"),
        *("--set", "engine.drain_timeout=3", "--set", "drain_timeout=5"),
    )
    assert settings["engine"].max_batch_size == 9
    assert [settings[role].drain_timeout for role in ("engine", "router", "detok")] == [3, 5, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_batch_size", "must have the form [SERVICE.]NAME=VALUE"),
        ("engine.max_batch_sise=8", "unknown setting engine.max_batch_sise; did you mean engine.max_batch_size?"),
        ("max_batch_sise=8", "unknown setting max_batch_sise; did you mean engine.max_batch_size?"),
        ("max_batch_size=0", "engine.max_batch_size: must be greater than or equal to 1 (got '0')"),
        ("metrics_port=9100", "unknown setting metrics_port; did you mean router.metrics_port?"),
        ("engin.overlap=yes", "did you mean engine.overlap?"),
        ("engine.max_batch_size=0", "engine.max_batch_size: must be greater than or equal to 1 (got '0')"),
        ("engine.dtype=int4", "engine.dtype: must be 'auto', 'float32'"),
        ("router.tenant_weights={", 'router.tenant_weights: must be a JSON object, such as {"name": 1} '),
        (
            "engine.logits_processors={a: b:c}",
            'engine.logits_processors: must be a JSON object, such as {"name": "value"} ',
        ),
        ("log_level=loud", "log_level: must be 'debug'"),
        ("engine.default_threads=2", "unknown setting engine.default_threads"),
        ("engine.listen=ipc:///x", "unknown setting engine.listen"),
    ],
)
def test_an_invalid_assignment_is_refused_before_anything_starts(refused, text, message):
    assert message in refused("--set", text)


def test_options_have_the_bounds_of_the_services_settings(refused):
    assert "engine.max_batch_size: must be less than or equal to 4096" in refused("--max-batch-size", "4097")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("max_batch_size=8", "max_tokens_per_step=4"),
            "max_tokens_per_step: must be at least max_batch_size, 8 (got 4)",
        ),
        (
            ("device=cuda", "backend=openvino"),
            "device = cuda contradicts backend = openvino: OpenVINO computes on",
        ),
        (("tensor_parallel=2", "quantize=int4"), "tensor_parallel = 2 contradicts quantize = int4"),
        (("device=cpu", "dtype=bfloat16", "attention=cpu"), "attention = cpu contradicts dtype = bfloat16"),
        (("backend=torch", "quantize=int8"), "quantize = int8 needs backend = openvino, not torch"),
        (("kv_cache_tokens=10",), "kv_cache_tokens: must be at least one block, 16 (got 10)"),
        (("kv_cache_tokens=20", "backend=openvino"), "kv_cache_tokens: must be at least one block, 32 (got 20)"),
        (("kv_cache_tokens=20", "tokens_per_block=64"), "kv_cache_tokens: must be at least one block, 64 (got 20)"),
    ],
)
def test_conflicting_settings_are_refused_before_anything_starts(settings, message):
    result = CliRunner().invoke(app, ["serve", *(part for text in settings for part in ("--set", text))])
    assert result.exit_code == 1
    assert f"engine_worker: {message}" in " ".join(result.stderr.split())


def test_settings_that_depend_on_the_device_are_left_to_the_engine(engine_settings):
    settings = ("--set", "dtype=bfloat16", "--set", "attention=flash")
    assert engine_settings(*settings).attention == "flash", "on a GPU, bfloat16 does not need OpenVINO"


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--max-tokens-per-step", "engine.max_tokens_per_step"),
        ("--no-chunked-context", "engine.chunked_context"),
        ("--priority-aging-seconds=5", "priority_aging_seconds"),
        ("--tls-client-ca", "router.tls_client_ca"),
    ],
)
def test_the_error_for_an_option_that_is_a_setting_shows_how_to_set_it(refused, option, key):
    assert f"{option.partition('=')[0]} is a setting, not an option; use --set {key}=" in refused(option, "1")


def test_settings_of_every_service_can_be_assigned():
    assert {key.partition(".")[0] for key in assignable() if "." in key} == set(PROCESSES)


def test_defaults_of_the_schedulers(engine_settings):
    settings = engine_settings()
    assert settings.capacity_scheduler_policy == "max_utilization"
    assert settings.scheduler is settings.micro_batch_scheduler is None


def test_the_launcher_passes_the_engines_shares(engine_settings):
    settings = engine_settings()
    assert settings.step_threads >= 1
    assert (settings.kv_memory_fraction, settings.engines_here, settings.engines_per_gpu) == (None, 1, 1)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("threads", 3, (3, None)),
        ("kv_memory_fraction", 0.125, (None, 0.125)),
        ("kv_cache_tokens", 4096, (None, None)),
    ],
)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_explicit_settings_override_the_launchers_shares(
    engine_settings, monkeypatch, tmp_path, source, name, value, expected
):
    flags = []
    if source == "flag":
        flags = ["--set", f"engine.{name}={value}"]
    elif source == "environment":
        monkeypatch.setenv(f"SLUICE_ENGINE_{name.upper()}", str(value))
    else:
        (tmp_path / "engine.yaml").write_text(f"{name}: {value}\n")
        monkeypatch.setenv("SLUICE_ENGINE_CONFIG", str(tmp_path / "engine.yaml"))
    settings = engine_settings(*flags)
    threads, fraction = expected
    assert settings.step_threads == (threads or settings.default_threads)
    assert settings.kv_memory_fraction == fraction


def test_tokens_and_a_fraction_are_both_passed(engine_settings):
    settings = engine_settings("--kv-cache-tokens", "4096", "--set", "engine.kv_memory_fraction=0.25")
    assert (settings.kv_cache_tokens, settings.kv_memory_fraction) == (4096, 0.25)


def test_numbers_of_engines_are_passed_to_the_ring(ring_options):
    options = ring_options("--prefill-engines", "1", "--decode-engines", "2")
    assert [options[name] for name in ("engines", "prefill_engines", "decode_engines")] == [None, 1, 2]
    assert ring_options("--engines", "3")["engines"] == 3


def test_engines_of_one_phase_alone_are_refused():
    result = CliRunner().invoke(app, ["serve", "--prefill-engines", "1"])
    assert result.exit_code == 1
    assert "prefill_engines needs decode_engines or engines" in " ".join(result.stderr.split())


def test_the_keepers_options_and_settings(settings_by_role):
    options = ("--kv-disk", "disk", "--kv-keeper", "tcp://10.0.0.7:5900", "--keys", "keys")
    settings = settings_by_role(*options, "--set", "keeper.disk_bytes=8GiB")
    keeper = settings["keeper"]
    assert (keeper.disk_folder, keeper.disk_bytes, keeper.listen) == (Path("disk"), 8 << 30, "tcp://10.0.0.7:5900")
    assert {settings[role].keys for role in ("router", "engine", "detok", "keeper")} == {Path("keys")}
    assert settings["engine"].kv_keeper == "tcp://10.0.0.7:5900"
    assert settings_by_role("--kv-disk", "disk", "--set", "disk_bytes=9")["keeper"].disk_bytes == 9


def test_the_folder_of_kv_caches_is_a_setting_of_engines(settings_by_role, refused):
    settings = settings_by_role("--kv-disk", "disk", "--set", "kv_folder=/dev/shm/mine")
    assert settings["engine"].kv_folder == "/dev/shm/mine"
    assert settings["keeper"].kv_folder == Path("kv")
    assert "unknown setting keeper.kv_folder" in refused("--set", "keeper.kv_folder=/x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-keeper", "here"), "kv_keeper must be tcp://IP:PORT"),
        (("--kv-keeper", "tcp://127.0.0.1:5900"), "kv_keeper: tcp://127.0.0.1:5900 can be reached by other users"),
        (("--kv-disk", "disk", "--set", "engine.kv_folder=none"), "kv_disk: a keeper hands out what engines have in"),
        (("--kv-disk", "disk", "--set", "engine.kv_fetch=no"), "kv_fetch is off"),
        (("--set", "keeper.disk_bytes=9"), "keeper_args: disk_bytes has no effect without a keeper"),
    ],
)
def test_options_of_a_keeper_that_are_refused(arguments, message):
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_the_revision_is_passed_to_the_ring(ring_options):
    assert ring_options("someone/model", "--revision", "v2")["revision"] == "v2"
    assert ring_options("someone/model")["revision"] is None


def test_a_revision_of_a_folder_is_refused():
    result = CliRunner().invoke(app, ["serve", str(tiny_model.path()), "--revision", "v2"])
    assert result.exit_code == 1
    assert "revision 'v2' applies only to Hugging Face models" in result.stderr
