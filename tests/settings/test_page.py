"""docs/settings.md is what the code says."""

from pathlib import Path

from sluice.settings.__main__ import page
from sluice.settings.describe import settings_of
from sluice.settings.services import SERVICES

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_as_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make settings"


def test_every_setting_is_described_but_the_launchers_own() -> None:
    listed = page()
    for cls in SERVICES.values():
        for setting in settings_of(cls).values():
            assert setting.description
            assert (f"| `{setting.name}` |" in listed) is not setting.launcher_only
