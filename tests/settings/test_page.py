"""docs/settings.md matches the declarations."""

from pathlib import Path

import pytest

from sluice.settings.__main__ import page
from sluice.settings.describe import ADVANCED_TITLE, sections_of, settings_of
from sluice.settings.read import load_settings
from sluice.settings.services import PROCESSES, EngineSettings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_as_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make settings"


def test_every_setting_is_listed_unless_only_the_launcher_sets_it() -> None:
    text = page()
    for cls in PROCESSES.values():
        for setting in settings_of(cls).values():
            assert setting.description
            assert (f"| `{setting.name}` |" in text) is not setting.launcher_only


def test_advanced_settings_are_listed_apart_in_the_page_and_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        load_settings(EngineSettings, ["--help"])
    for text, debug, rank in (
        (page(), "`debug_folder`", "`lora_max_adapter_size`"),
        (capsys.readouterr().out, "--debug-folder", "--lora-max-adapter-size"),
    ):
        usual, advanced = text.split(ADVANCED_TITLE)
        assert debug in advanced
        assert debug not in usual
        assert rank in usual
    for title, settings in sections_of(EngineSettings).items():
        assert {setting.advanced for setting in settings} == {title == ADVANCED_TITLE}


@pytest.mark.parametrize(
    ("service", "name", "type_name", "default"),
    [
        ("gateway", "routers", "list of text", "127.0.0.1:50051"),
        ("gateway", "tool_parser", "hermes", "unset"),
        ("gateway", "max_body_bytes", "bytes", "8MiB"),
        ("engine", "kv_host_memory", "bytes", "0"),
        ("engine", "quantize", "none | int8 | int4 | fp8", "none"),
        ("engine", "max_attention_window", "list of int", "empty"),
        ("router", "tenant_weights", "JSON object", "empty"),
        ("router", "drain_timeout", "number", "10"),
        ("router", "model", "text", "required"),
        ("keeper", "kv_folder", "text", "required"),
        ("keeper", "disk_bytes", "bytes", "16GiB"),
    ],
)
def test_types_and_defaults_are_written_as_users_write_them(
    service: str, name: str, type_name: str, default: str
) -> None:
    setting = settings_of(PROCESSES[service])[name]
    assert (setting.type_name, setting.default) == (type_name, default)
