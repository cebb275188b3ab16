"""Functions that settings name as `module:function`."""

import sys

import pytest

from sluice.ring.names import find_function


@pytest.mark.parametrize("name", ["json", "json:", ":dumps", "no_such_module:f", "json:nothing", "json:__name__"])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(ValueError, match=f"^stats_callback: '{name}' cannot be used: "):
        find_function("stats_callback", name)


def test_a_function_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_statistics.py").write_text("def echo(text): return text\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("stats_callback", "my_statistics:echo")("x") == "x"
    assert str(tmp_path) not in sys.path
    sys.modules.pop("my_statistics")
