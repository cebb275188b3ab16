"""How a service reads its settings."""

import json
from typing import Annotated, ClassVar

import pytest
from pydantic.dataclasses import dataclass

from sluice.settings.fields import Range
from sluice.settings.process import STRICT
from sluice.settings.read import changed_settings, load_settings
from sluice.settings.services import EngineSettings, RouterSettings, ServiceSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(ServiceSettings):
    """A service for tests."""

    role: ClassVar = "test"
    module: ClassVar[str] = "service"
    summary: ClassVar[str] = "A service for tests."

    port: Annotated[int, Range(ge=1)] = 8080
    """Port."""
    engines: tuple[str, ...] = ()
    """Addresses."""


def load(*argv: str) -> Settings:
    return load_settings(Settings, argv)


def test_precedence_is_flag_environment_file_default(monkeypatch, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model: from-file\nport: 1\n")
    assert load("--config", str(file)).model == "from-file"
    monkeypatch.setenv("SLUICE_TEST_PORT", "2")
    assert load("--config", str(file)).port == 2
    assert load("--config", str(file), "--port", "3").port == 3
    monkeypatch.setenv("SLUICE_TEST_CONFIG", str(file))
    assert load().port == 2
    assert load().model == "from-file"
    assert load().engines == ()


def test_an_error_shows_the_invalid_value_and_its_environment_variable(monkeypatch):
    monkeypatch.setenv("SLUICE_TEST_PORT", "many")
    with pytest.raises(SystemExit, match=r"port: must be a valid integer \(got 'many' from SLUICE_TEST_PORT\)"):
        load("--model", "m")
    with pytest.raises(SystemExit, match=r"port: must be a valid integer \(got 'few'\)"):
        load("--model", "m", "--port", "few")


def test_a_list_is_read_from_repeated_flags_commas_and_the_environment(monkeypatch):
    assert load("--model", "m", "--engines", "a", "--engines", "b").engines == ("a", "b")
    assert load("--model", "m", "--engines", "a,b").engines == ("a", "b")
    monkeypatch.setenv("SLUICE_TEST_ENGINES", "a,b")
    assert load("--model", "m").engines == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--port", "1"), "model"),
        (("--model", "m", "--port", "0"), "port"),
        (("--model", "m", "--config", "/no"), "/no"),
    ],
)
def test_invalid_settings_end_the_process_and_are_named(argv, message):
    with pytest.raises(SystemExit, match=message):
        load(*argv)


def test_unknown_names_are_refused_with_the_nearest_known_name(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"--prot 1; did you mean --port\?"):
        load("--model", "m", "--prot", "1")
    file = tmp_path / "settings.yaml"
    file.write_text("modell: m\nprot: 1\n")
    with pytest.raises(SystemExit, match=r"setting modell; did you mean model\?; unknown setting prot; did you mean"):
        load("--model", "m", "--config", str(file))
    monkeypatch.setenv("SLUICE_TEST_PROT", "1")
    with pytest.raises(SystemExit, match=r"SLUICE_TEST_PROT; did you mean SLUICE_TEST_PORT\?"):
        load("--model", "m")


def test_all_errors_are_reported_in_one_line():
    with pytest.raises(SystemExit) as caught:
        load("--port", "0")
    assert "model is required: set --model" in str(caught.value)
    assert "port: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        load(flag)
    assert caught.value.code == 0
    assert "--port" in capsys.readouterr().out


def test_service_variables_of_kubernetes_are_not_read_as_settings(monkeypatch):
    monkeypatch.setenv("SLUICE_TEST_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SLUICE_TEST_SERVICE_PORT_GRPC", "50051")
    monkeypatch.setenv("SLUICE_TEST_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("SLUICE_TEST_PORT_50051_TCP_ADDR", "10.0.0.1")
    assert load("--model", "m").port == 8080


def test_a_settings_file_cannot_name_another_one(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nconfig: other.yaml\n")
    with pytest.raises(SystemExit, match="config"):
        load("--config", str(file))


def test_an_environment_variable_shared_with_other_programs(monkeypatch):
    def endpoint(*argv: str) -> str | None:
        return load_settings(RouterSettings, ["--model", "m", *argv]).otlp_endpoint

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    assert endpoint() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://shared:4317")
    assert endpoint() == "http://shared:4317"
    monkeypatch.setenv("SLUICE_ROUTER_OTLP_ENDPOINT", "http://own:4317")
    assert endpoint() == "http://own:4317"
    assert endpoint("--otlp-endpoint", "https://flag:4317") == "https://flag:4317"
    # Services without this setting ignore the variable.
    load_settings(EngineSettings, ["--model", "m"])
    monkeypatch.setenv("SLUICE_ROUTER_OTLP_ENDPOINT", "collector:4317")
    with pytest.raises(SystemExit, match="otlp_endpoint"):
        endpoint()


def test_settings_with_their_default_values_are_omitted() -> None:
    assert changed_settings(EngineSettings(model="m", id="e")) == {"model": "m", "id": "e"}
    same = EngineSettings(model="m", id="e", max_batch_size=64, logits_processors={})
    assert changed_settings(same) == {"model": "m", "id": "e"}


def test_values_of_every_type_can_be_written_as_json() -> None:
    values = {
        "model": "m",
        "id": "e",
        "keys": "/keys",
        "overlap": False,
        "max_attention_window": [64, 128],
        "logits_processors": {"upper": "mine:upper"},
        "capacity_scheduler_policy": "guaranteed_no_evict",
    }
    settings = EngineSettings(**values, kv_host_memory="8GiB")
    assert json.loads(json.dumps(changed_settings(settings))) == {**values, "kv_host_memory": 8 << 30}


def test_settings_that_only_a_launcher_passes_are_omitted() -> None:
    assert "engines_here" not in changed_settings(EngineSettings(model="m", engines_here=2))


def test_credentials_in_a_url_are_omitted() -> None:
    settings = RouterSettings(model="m", id="r", otlp_endpoint="http://me:secret@collector:4317")
    assert changed_settings(settings)["otlp_endpoint"] == "http://…@collector:4317"
    settings = RouterSettings(model="m", id="r", otlp_endpoint="https://me:se@cret@collector:4317?key=secret")
    assert changed_settings(settings)["otlp_endpoint"] == "https://…@collector:4317?…"
    settings = RouterSettings(model="m", id="r", otlp_endpoint="http://collector:4317")
    assert changed_settings(settings)["otlp_endpoint"] == "http://collector:4317"


@pytest.mark.parametrize(
    ("flags", "folder", "needed"),
    [
        ((), None, False),
        (("--default-kv-folder", "/dev/shm/ring"), "/dev/shm/ring", False),
        (("--default-kv-folder", "/dev/shm/ring", "--kv-folder", "/dev/shm/mine"), "/dev/shm/mine", True),
        (("--default-kv-folder", "/dev/shm/ring", "--kv-folder", "none"), None, False),
    ],
)
def test_a_users_folder_for_the_kv_cache_replaces_the_launchers(flags, folder, needed):
    settings = load_settings(EngineSettings, ("--model", "m", *flags))
    assert (settings.pool_folder, settings.needs_pool_folder) == (folder, needed)


def test_ranks_that_share_a_block_have_no_file():
    with pytest.raises(ValueError, match=r"kv_folder: is not supported with tensor_parallel > 1 \(got 2\)"):
        EngineSettings(model="m", kv_folder="/dev/shm/mine", tensor_parallel=2)
    # The launcher's folder is no reason to refuse.
    for folder in ({"kv_folder": "none"}, {"default_kv_folder": "/dev/shm/mine"}):
        EngineSettings(model="m", tensor_parallel=2, **folder)
