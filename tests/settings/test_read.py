"""How a service reads its settings."""

from typing import Annotated, ClassVar

import pytest
from pydantic.dataclasses import dataclass

from sluice.settings.fields import Range
from sluice.settings.process import STRICT
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings, RouterSettings, ServiceSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(ServiceSettings):
    """A service of a test."""

    role: ClassVar = "test"
    module: ClassVar[str] = "service"
    summary: ClassVar[str] = "Is tested."

    port: Annotated[int, Range(ge=1)] = 8080
    """Port."""
    engines: tuple[str, ...] = ()
    """Addresses."""


def load(*argv: str) -> Settings:
    return load_settings(Settings, argv)


def test_flag_before_environment_before_file_before_default(monkeypatch, tmp_path):
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


def test_a_bad_value_is_shown_with_the_variable_it_came_from(monkeypatch):
    monkeypatch.setenv("SLUICE_TEST_PORT", "many")
    with pytest.raises(SystemExit, match=r"port: must be a valid integer \(got 'many' from SLUICE_TEST_PORT\)"):
        load("--model", "m")
    with pytest.raises(SystemExit, match=r"port: must be a valid integer \(got 'few'\)"):
        load("--model", "m", "--port", "few")


def test_lists_by_repeated_flag_by_comma_and_by_environment(monkeypatch):
    assert load("--model", "m", "--engines", "a", "--engines", "b").engines == ("a", "b")
    assert load("--model", "m", "--engines", "a,b").engines == ("a", "b")
    monkeypatch.setenv("SLUICE_TEST_ENGINES", "a,b")
    assert load("--model", "m").engines == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--port", "1"), "model"),
        (("--model", "m", "--port", "0"), "port"),
        (("--model", "m", "--config", "/no"), "/no"),
    ],
)
def test_bad_settings_end_the_process_and_are_named(argv, named):
    with pytest.raises(SystemExit, match=named):
        load(*argv)


def test_unknown_keys_are_refused_wherever_they_stand_with_the_nearest_known_one(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"--prot 1; did you mean --port\?"):
        load("--model", "m", "--prot", "1")
    file = tmp_path / "settings.yaml"
    file.write_text("modell: m\n")
    with pytest.raises(SystemExit, match=r"unknown setting modell; did you mean model\?"):
        load("--model", "m", "--config", str(file))
    monkeypatch.setenv("SLUICE_TEST_PROT", "1")
    with pytest.raises(SystemExit, match=r"SLUICE_TEST_PROT; did you mean SLUICE_TEST_PORT\?"):
        load("--model", "m")


def test_all_that_is_wrong_is_one_line():
    with pytest.raises(SystemExit) as caught:
        load("--port", "0")
    assert "model is needed: --model" in str(caught.value)
    assert "port: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        load(flag)
    assert caught.value.code == 0
    assert "--port" in capsys.readouterr().out


def test_service_links_of_kubernetes_are_no_settings(monkeypatch):
    monkeypatch.setenv("SLUICE_TEST_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SLUICE_TEST_SERVICE_PORT_GRPC", "50051")
    monkeypatch.setenv("SLUICE_TEST_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("SLUICE_TEST_PORT_50051_TCP_ADDR", "10.0.0.1")
    assert load("--model", "m").port == 8080


def test_a_settings_file_names_no_other(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nconfig: other.yaml\n")
    with pytest.raises(SystemExit, match="config"):
        load("--config", str(file))


def test_a_variable_that_other_programs_share(monkeypatch):
    def endpoint(*argv: str) -> str | None:
        return load_settings(RouterSettings, ["--model", "m", *argv]).otlp_endpoint

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    assert endpoint() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://shared:4317")
    assert endpoint() == "http://shared:4317"
    monkeypatch.setenv("SLUICE_ROUTER_OTLP_ENDPOINT", "http://own:4317")
    assert endpoint() == "http://own:4317"
    assert endpoint("--otlp-endpoint", "https://flag:4317") == "https://flag:4317"
    # The others take no notice of it.
    load_settings(EngineSettings, ["--model", "m"])
    monkeypatch.setenv("SLUICE_ROUTER_OTLP_ENDPOINT", "collector:4317")
    with pytest.raises(SystemExit, match="otlp_endpoint"):
        endpoint()
